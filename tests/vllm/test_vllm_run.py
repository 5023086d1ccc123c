"""A whole run with a colocated vLLM: after every optimizer step the engine samples from the trainer's own policy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from test_runs import QUIET, assert_equal_runs, run
from toys import spawn

from lightning_rlhf import FSDPUlyssesStrategy, GRPOLightningModule, PromptDataModule, RolloutCallback, Sampling
from lightning_rlhf.rollout import VLLMEngine
from lightning_rlhf.tiny import share_of_digits

pytestmark = [pytest.mark.vllm]

ENGINE = [
    "--rollout.engine=lightning_rlhf.rollout.VLLMEngine",
    "--rollout.engine.kv_cache_memory_bytes=33554432",
    "--rollout.log_probs_every=1",
    "--trainer.val_check_interval=2",
]


@pytest.mark.parametrize(("devices", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_log_probs_of_engine_and_trainer_agree_in_every_iteration(devices, tp, tmp_path):
    split = [f"--trainer.devices={devices}", f"--rollout.engine.tensor_parallel_size={tp}"]
    rows = run(tmp_path, "tiny_ppo.yaml", *QUIET, *ENGINE, *split)
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 4
    assert trained[0]["actor/grad_norm"] > 0
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in trained)
    assert any("val/heldout/reward" in row for row in rows)


def test_the_engine_generates_beside_the_update(tmp_path):
    """In a thread of its own: what it draws, and so the run, is what it draws without one."""
    ahead = ["--rollout.async_level=1", "--model.correction={}"]
    first, second = (run(tmp_path / name, "tiny_ppo.yaml", *QUIET, *ENGINE, *ahead) for name in "ab")
    trained = [row for row in first if "reward/mean" in row]
    assert [row.get("rollout/staleness") for row in trained] == [None, 1.0, 1.0, 1.0]
    assert trained[0]["rollout/logprob_diff_max"] < 1e-4 < trained[1]["rollout/logprob_diff_max"]
    assert trained[0]["rollout/is_ess"] > 1 - 1e-6 > trained[2]["rollout/is_ess"] > 0.9
    assert_equal_runs(first, second, 1e-7)


def test_rounds_with_greedy_responses_among_the_sampled_ones(tmp_path):
    recipe = ["--model.init_args.advantage=remax", "--rollout.filter_groups={max_num_gen_batches: 2}"]
    rows = run(tmp_path, "tiny_grpo.yaml", *QUIET, *ENGINE, *recipe, "--rollout.sampling.num_generations=2")
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 4
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in trained)
    assert all(row["rollout/gen_batches"] == 2.0 and row["reward/frac_zero_std"] == 0.0 for row in trained)
    assert all("reward/greedy_mean" in row for row in trained)


class Fails(GRPOLightningModule):
    def policy_loss(self, *args: object, **kwargs: object) -> None:
        raise ArithmeticError("of the module")


def fit(module: type[GRPOLightningModule], engine: VLLMEngine, length: int = 8, **options: Any) -> pl.Trainer:
    """After one iteration."""
    sampling = Sampling(num_generations=2, max_completion_length=length, ignore_eos=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(engine, sampling=sampling)],
    )
    data = PromptDataModule(path="lightning_rlhf.tiny.sums", batch_size=4, max_prompt_length=64)
    trainer.fit(module("random:tiny", reward=[share_of_digits], **options), datamodule=data)
    return trainer


def runs_of_one_engine(rank: int) -> tuple[list[float], list[float], bool]:
    engine = VLLMEngine(kv_cache_memory_bytes=32 << 20)
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    trainers = [fit(GRPOLightningModule, engine)]
    first = engine.llm
    trainers.append(fit(GRPOLightningModule, engine, length=4))
    kept = engine.llm is first
    trainers.append(fit(GRPOLightningModule, engine, length=60))
    trainers.append(fit(GRPOLightningModule, engine, config_overrides=one_layer))
    metrics = [trainer.callback_metrics for trainer in trainers]
    names = ("completions/mean_length", "rollout/logprob_diff_max")
    lengths, differences = ([m[name].item() for m in metrics] for name in names)
    return lengths, differences, kept


def test_an_engine_that_cannot_serve_the_next_run_is_built_anew():
    ((lengths, differences, kept),) = spawn(runs_of_one_engine, 1)
    assert kept
    assert lengths == [8, 4, 60, 8]
    assert max(differences) < 1e-4


def lives_of_engines(rank: int) -> tuple[bool, list[int], str, int]:
    first, second, third = (VLLMEngine(kv_cache_memory_bytes=32 << 20) for _ in range(3))
    with pytest.raises(ArithmeticError, match="of the module"):
        fit(Fails, first)
    closed = first.llm is None
    steps = [fit(GRPOLightningModule, second).global_step for _ in range(2)]
    with pytest.raises(RuntimeError) as refused:
        fit(GRPOLightningModule, third)
    second.close()
    return closed, steps, str(refused.value), fit(GRPOLightningModule, third).global_step


def test_an_engine_is_closed_after_a_failure_and_serves_the_next_run_otherwise():
    ((closed, steps, refused, after),) = spawn(lives_of_engines, 1)
    assert closed
    assert steps == [1, 1]
    assert "there is already an engine in this process, vLLM can run one: close it first" in refused
    assert after == 1
