"""What an iteration reports."""

from __future__ import annotations

import csv
import os

import lightning.pytorch as pl
import pytest
import torch
from toys import TINY_MODULE, even_tokens, fit

from lightning_rlhf import KL, FSDPUlyssesStrategy, GRPOLightningModule, PromptDataModule, RolloutCallback
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.report import Alarms, add_scores, constant_groups, finish, outlive
from lightning_rlhf.types import Experience, Sampling, Scores


def experience(scores: list[float], groups: list[int], usable: list[int]) -> Experience:
    mask = torch.tensor(usable, dtype=torch.float32)[:, None]
    return Experience(
        sequences=[torch.zeros(2)] * len(scores),
        prompt_lengths=[1] * len(scores),
        group=torch.tensor(groups),
        mask=mask,
        rewards=torch.tensor(scores, dtype=torch.float32)[:, None],
        temperature=1.0,
        max_length=1,
    )


def test_the_share_of_groups_that_teach_nothing():
    assert constant_groups(experience([1, 1, 0, 1, 2, 2], [4, 4, 9, 9, 2, 2], [1] * 6)) == pytest.approx(2 / 3)
    # a response that takes part in nothing does not make a group interesting
    assert constant_groups(experience([1, 0], [0, 0], [1, 0])) == 1.0


CUT = {"completions/clipped_ratio": 0.6}


def test_truncation_in_five_iterations_in_a_row_warns_and_names_the_setting():
    alarms = Alarms()
    for _ in range(4):
        alarms(CUT, Sampling(max_completion_length=77))
    alarms({"completions/clipped_ratio": 0.1}, Sampling())  # breaks the row
    for _ in range(4):
        alarms(CUT, Sampling(max_completion_length=77))
    with pytest.warns(
        UserWarning, match="were cut in 5 iterations in a row: raise rollout.sampling.max_completion_length"
    ):
        alarms(CUT, Sampling(max_completion_length=77))


def test_lengths_that_are_meant_to_be_full_do_not_warn():
    alarms = Alarms()
    for _ in range(6):
        alarms(CUT, Sampling(ignore_eos=True))


def test_an_engine_that_is_far_from_the_trainer_warns():
    with pytest.warns(UserWarning, match=r"log-probs differ from the trainer's by 0\.50"):
        Alarms()({"completions/clipped_ratio": 0.0, "rollout/logprob_diff_mean": 0.5}, Sampling())


def test_rewards_that_are_all_alike_from_the_beginning_warn():
    found = experience([0.25, 0.25, 1.0], [1, 1, 2], [1, 1, 0])
    solved, alarms = Alarms(), Alarms()
    solved.look_at_rewards(experience([0.25, 0.5], [1, 1], [1, 1]))
    for _ in range(9):  # every response is right in the end
        solved.look_at_rewards(found)
    for _ in range(4):
        alarms.look_at_rewards(found)
        alarms.look_at_rewards(experience([1.0, 2.0], [1, 1], [0, 0]))  # says nothing
    with pytest.warns(UserWarning, match=r"all responses of the first 5 iterations had the reward 0\.25"):
        alarms.look_at_rewards(found)


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_rewards_that_are_alike_once_they_are_clipped_warn(tmp_path):
    module = GRPOLightningModule(
        **TINY_MODULE, reward=[even_tokens], reward_clip=(-2.0, -1.0), kl=KL(coef=0.1, where="reward")
    )
    with pytest.warns(UserWarning, match="had the reward -1, which teaches nothing: .* model.reward_clip"):
        fit(module, tmp_path, 5)


@pytest.mark.parametrize("responses", [16, 51])
@pytest.mark.parametrize("reward", [0.1, -1.7, 1000.1])
def test_equal_rewards_have_no_deviation_whatever_they_round_to(reward, responses):
    metrics = Metrics()
    add_scores(metrics, Scores(torch.full((responses,), reward)), [])
    assert finish(metrics.reduce())["reward/std"] == 0.0


def test_a_small_deviation_of_large_rewards_is_seen():
    metrics = Metrics()
    add_scores(metrics, Scores(torch.tensor([1000.0, 1000.125] * 50)), [])
    assert finish(metrics.reduce())["reward/std"] == pytest.approx(0.0625, rel=1e-6)


def test_an_iteration_without_any_opinion_warns():
    nothing = {"completions/clipped_ratio": 0.0, "reward/abstained": 1.0, "reward/mean": float("nan")}
    with pytest.warns(UserWarning, match="every reward function abstained"):
        Alarms()(nothing, Sampling())


class Full(pl.Callback):
    """The disk is full in the second and third iteration."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step in (1, 3):
            file = trainer.logger.experiment.metrics_file_path
            kept = f"{file}.kept"
            os.rename(*((file, kept) if trainer.global_step == 1 else (kept, file)))
            if trainer.global_step == 1:
                os.symlink("/dev/full", file)


def test_a_logger_on_a_full_disk_warns_once_and_ends_no_run(tmp_path):
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=4,
        log_every_n_steps=1,
        logger=pl.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(sampling={"max_completion_length": 4}), Full()],
    )
    model = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    with pytest.warns(UserWarning, match=r"OSError: \[Errno 28\] No space left") as warned:
        trainer.fit(model, PromptDataModule("toys.prompts", batch_size=4, max_prompt_length=32))
    told = [str(one.message) for one in warned if "could not write metrics" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith(f"CSVLogger could not write metrics to {str(tmp_path)!r} (OSError")
    with open(trainer.logger.experiment.metrics_file_path, newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]  # there is room again at the end
    methods = [vars(trainer.logger)[name] for name in ("log_metrics", "save", "finalize")]
    outlive(trainer.loggers)  # as a second fit does
    assert [vars(trainer.logger)[name] for name in ("log_metrics", "save", "finalize")] == methods
