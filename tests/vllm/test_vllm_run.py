"""A whole run with a colocated vLLM: after every optimizer step the engine samples from the trainer's own policy."""

from __future__ import annotations

import time
from threading import Event, current_thread, main_thread
from typing import Any

import lightning.pytorch as pl
import pytest
from test_runs import QUIET, assert_equal_runs, run
from toys import spawn

from lightning_rlhf import FSDPUlyssesStrategy, GRPOLightningModule, PromptDataModule, RolloutCallback, Sampling
from lightning_rlhf.modules.correction import Correction
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


def fit(
    module: type[GRPOLightningModule],
    engine: VLLMEngine,
    length: int = 8,
    async_level: int = 0,
    max_steps: int = 1,
    **options: Any,
) -> pl.Trainer:
    """After ``max_steps`` iterations."""
    sampling = Sampling(num_generations=2, max_completion_length=length, ignore_eos=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(engine, sampling=sampling, async_level=async_level)],
    )
    data = PromptDataModule(path="lightning_rlhf.tiny.sums", batch_size=4, max_prompt_length=64)
    correction = Correction() if async_level else None
    trainer.fit(module("random:tiny", reward=[share_of_digits], correction=correction, **options), datamodule=data)
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


class Interrupted(GRPOLightningModule):
    """By Ctrl-C in the first update, when the generation beside it is under way."""

    begun = Event()

    def update(self, experience: object) -> dict[str, float]:
        assert self.begun.wait(60)
        raise KeyboardInterrupt


def steps_to_the_end(rank: int) -> tuple[int, bool, int]:
    """Of 200 that the generation beside the update would take, whether the engine was closed, iterations of the next run."""
    from vllm.v1.engine.llm_engine import LLMEngine

    step, beside = LLMEngine.step, []

    def counted(engine: Any) -> Any:
        if current_thread() is not main_thread():
            beside.append(None)
            Interrupted.begun.set()
            time.sleep(0.05)
        return step(engine)

    LLMEngine.step = counted
    engine = VLLMEngine(kv_cache_memory_bytes=32 << 20)
    with pytest.raises(SystemExit):
        fit(Interrupted, engine, length=200, async_level=1, max_steps=2)
    closed = engine.llm is None
    return len(beside), closed, fit(GRPOLightningModule, engine, async_level=1, max_steps=2).global_step


def test_ctrl_c_ends_the_generation_beside_the_update_between_two_of_its_steps():
    ((steps, closed, after),) = spawn(steps_to_the_end, 1)
    assert 1 <= steps < 20
    assert closed
    assert after == 2
