"""Faults of the rollout phase: nothing hangs, nothing is lost, and what ends the run says what to change."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import subprocess
import sys
import time
import traceback
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_runs import QUIET, ROOT
from toys import TINY_MODULE, even_tokens, fit, spawn

from lightning_rlhf import (
    KL,
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    PPOLightningModule,
    PromptDataModule,
    RLHFLightningModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.callbacks import faults
from lightning_rlhf.callbacks import rollout as callback
from lightning_rlhf.callbacks.faults import agreed, makes_room, told_by_settings
from lightning_rlhf.callbacks.rollout_steps import RolloutSteps
from lightning_rlhf.callbacks.watchdog import HUNG
from lightning_rlhf.phases import Phases
from lightning_rlhf.plan.memory import Rung
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.rollout.vllm_requests import completion_of
from lightning_rlhf.rollout.weights import gather
from lightning_rlhf.types import Completion, Prompts

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.25 GiB is free."
    " Including non-PyTorch memory, this process has 138.56 GiB memory in use."
)
VLLM_SAYS = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """0.5 and a bit per token: an empty response has a reward, too."""
    return [0.5 + len(ids) / 100 for ids in completion_ids]


class Fails(TransformersEngine):
    """Raises ``error`` in a step of its second phase, on one rank."""

    def __init__(self, step: str, error: Exception, rank: int = 0) -> None:
        super().__init__()
        self.step, self.error, self.rank, self.phase = step, error, rank, 0

    def _reach(self, step: str) -> None:
        if step == self.step and self.phase == 2 and int(os.environ.get("RANK", 0)) == self.rank:
            raise self.error

    def wake(self, tags: Any) -> None:
        self.phase += "weights" in tags
        self._reach(*tags)
        super().wake(tags)

    def load_weights(self, weights: Any, version: int) -> None:
        def some() -> Any:
            for number, one in enumerate(weights):
                if number == 3:
                    self._reach("load")
                yield one

        super().load_weights(some(), version)

    def checksum(self) -> int | None:
        if torch.distributed.get_world_size() > 1:  # as of an engine that the ranks share
            torch.distributed.barrier()
        return super().checksum()

    def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        self._reach("generate")
        return super().generate(*args, **kwargs)

    def sleep(self, level: int) -> None:
        self._reach("sleep")
        super().sleep(level)


# -- out of memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(TORCH_SAYS), r"ran out of GPU memory \(2\.50 GiB asked, 1\.25 GiB free\): a, b or c$"),
        (RuntimeError(VLLM_SAYS), r"^the step ran out of GPU memory: a, b or c$"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device adds what is free")
def test_out_of_memory_says_how_much_and_what_to_change(error, said):
    with pytest.raises(torch.OutOfMemoryError, match=said) as caught, told_by_settings("the step", ["a", "b", "c"]):
        raise error
    assert caught.value.__cause__ is error


def test_a_cause_counts_and_another_error_is_left_alone():
    with pytest.raises(torch.OutOfMemoryError, match="ran out"), told_by_settings("x", ["a", "b"]):
        raise ValueError("the worker died") from torch.OutOfMemoryError("no")
    with pytest.raises(ValueError, match=r"^no tokens$"), told_by_settings("x", ["a", "b"]):
        raise ValueError("no tokens")


@pytest.mark.parametrize(
    ("step", "options", "said"),
    [
        (
            "kv_cache",
            {},
            r"^wake kv_cache of iteration 2 ran out of GPU memory \(2\.50 GiB asked, 1\.25 GiB free\): lower rollout\.engine"
            r"\.batch_size, set rollout\.offload_optimizer: true or set rollout\.offload_parameters: true$",
        ),
        (
            "generate",
            {"offload_optimizer": True, "offload_parameters": True},
            r"^generate of iteration 2 ran .*: lower rollout\.engine\.batch_size, set model\.offload_reference: true or shard",
        ),
        (
            "weights",  # the engine's cache is not there yet, and parameters are needed for the sync
            {},
            r"^wake weights of iteration 2 ran .*: set rollout\.offload_optimizer: true, set model\.offload_reference: true or"
            r" shard over more trainer\.devices$",
        ),
    ],
)
def test_out_of_memory_closes_the_engine_and_brings_the_state_back(tmp_path, step, options, said):
    engine, original = Fails(step, torch.OutOfMemoryError(TORCH_SAYS)), None
    module = PPOLightningModule(**TINY_MODULE, reward=[even_tokens], kl=KL(coef=0.1))
    callbacks: list[Any] = []
    module.on_train_start = lambda: callbacks.extend(module.trainer.callbacks)  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match=said) as caught:
        fit(module, tmp_path, 3, {"engine": engine} | options)
    original = caught.value.__cause__
    assert original is engine.error
    assert engine.model is None
    (rollout,) = [c for c in callbacks if isinstance(c, RolloutCallback)]
    assert not rollout._steps.host.in_use
    assert module.trainer.global_step == 1


SYNC = ["set rollout.offload_optimizer: true", "set model.offload_reference: true", "shard over more trainer.devices"]


@pytest.mark.parametrize(
    ("step", "rung", "on_host", "said"),
    [
        ("sync", Rung(0, False, False), False, SYNC),
        ("reload", Rung(0, False, False), False, ["set rollout.sleep_level: 2", *SYNC[:2]]),
        ("reload", Rung(2, True, False), False, [*SYNC[1:], "take a smaller model.model"]),
        ("reload", Rung(2, False, True), True, [SYNC[0], SYNC[2], "take a smaller model.model"]),
    ],
)
def test_no_setting_is_named_that_is_set_or_does_not_help(step, rung, on_host, said):
    rollout = RolloutCallback()
    rollout.rung = rung
    module: Any = SimpleNamespace(reference=object(), settings=SimpleNamespace(offload_reference=on_host))
    assert makes_room(step, rollout, module) == said


class HoldsMemory(Fails):
    """Has a tensor in the frame that fails."""

    def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        cache = torch.zeros(10)
        self.held = weakref.ref(cache)
        return super().generate(*args, **kwargs)


def test_what_the_failed_calls_held_is_free_before_the_state_comes_back(tmp_path):
    engine, seen = HoldsMemory("generate", torch.OutOfMemoryError(TORCH_SAYS)), []
    engine.close = lambda: seen.append(engine.held())  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match=r"^generate of iteration 2"):
        fit(GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]), tmp_path, 3, {"engine": engine})
    assert seen == [None]


# -- prompts -----------------------------------------------------------------------------------------------------------


class Batches:
    """Not a list: to Lightning that is a collection of loaders."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class OwnData(pl.LightningDataModule):
    """A user's: prompts of ``tokens`` tokens, nothing said about their length."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def train_dataloader(self) -> Any:
        return Batches({"prompts": Prompts([[5, 6], [7] * self.tokens], ["a", "b"], {}, torch.tensor([4, 17]))})

    val_dataloader = train_dataloader


@pytest.mark.parametrize("tokens", [0, 2048, 5000])
def test_a_prompt_that_leaves_no_room_for_a_response_is_named(tmp_path, tokens):
    """random:tiny has 2048 positions."""
    said = rf"^data: a prompt must have 1 to 2047 tokens .* context of 2048, that of row 17 has {tokens}: drop it in your Data"
    with pytest.raises(ValueError, match=said):
        fit_data(GRPOLightningModule(**TINY_MODULE, reward=[length]), OwnData(tokens), 1)


def fit_data(module: RLHFLightningModule, data: Any, devices: int, **rollout: Any) -> pl.Trainer:
    """A run of two iterations without a logger."""
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FSDPUlyssesStrategy(),
        max_steps=2,
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(sampling=Sampling(num_generations=2, max_completion_length=6), **rollout)],
    )
    trainer.fit(module, datamodule=data)
    return trainer


# -- empty, aborted, without log-probs ---------------------------------------------------------------------------------


class Changes(TransformersEngine):
    """Its ``change`` makes another completion of each, given its number; in the first iteration only."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change, self.phase = change, 0

    def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        self.phase += 1
        made = super().generate(*args, **kwargs)
        return [self.change(i, c) for i, c in enumerate(made)] if self.phase == 1 else made


EMPTY, EOS = Completion([], "stop", []), Completion([1], "stop", [-5.5])


@pytest.mark.parametrize("kind", [GRPOLightningModule, PPOLightningModule])
@pytest.mark.parametrize(
    ("change", "mean_length"),
    [
        (lambda i, c: (EMPTY, EOS, Completion([2, 3, 4], "stop", [-5.5] * 3), EMPTY)[i % 4], 1.0),
        (lambda i, c: EOS, 1.0),
        (lambda i, c: EMPTY, 0.0),
    ],
    ids=["some", "all EOS", "all empty"],
)
def test_empty_responses_are_scored_and_spoil_nothing(tmp_path, kind, change, mean_length):
    module = kind(**TINY_MODULE, reward=[length], mini_batches=2, kl=KL(coef=0.1, where="reward"), entropy_coef=0.01)
    rows = fit(module, tmp_path, 3, {"engine": Changes(change), "log_probs_every": 1}, num_generations=2)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["completions/mean_length"] == mean_length
    assert rows[0]["reward/mean"] == pytest.approx(0.5 + mean_length / 100)
    assert rows[0]["actor/skipped_steps"] == 0.0
    assert rows[0]["actor/grad_norm"] == 0.0 if mean_length == 0 else rows[0]["actor/grad_norm"] >= 0.0
    assert rows[1]["actor/grad_norm"] > 0.0
    assert all(p.isfinite().all() for p in module.actor.parameters())


def test_aborted_responses_are_counted_and_left_out(tmp_path):
    def abort(i: int, c: Completion) -> Completion:
        return Completion(c.token_ids, "stop" if i % 4 else "abort", c.log_probs)

    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    (row,) = fit(module, tmp_path, 1, {"engine": Changes(abort)}, num_generations=2)
    assert module.last_experience.mask.any(1).float().mean() == 0.75
    assert row["completions/aborted_ratio"] == 0.25
    assert row["completions/clipped_ratio"] == 0.0


def test_vllm_s_answers_without_tokens_or_of_another_end_are_completions():
    nothing = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="error")
    assert completion_of(nothing, log_probs=True) == Completion([], "abort", [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_no_numbers_are_counted_and_left_out_of_the_mismatch(tmp_path, bad):
    def spoil(i: int, c: Completion) -> Completion:
        return Completion(c.token_ids, c.finish_reason, [bad, *c.log_probs[1:]] if i % 2 else c.log_probs)

    plain, spoilt = [
        fit(
            GRPOLightningModule(**TINY_MODULE, reward=[even_tokens], ppo_epochs=2),
            tmp_path / name,
            2,
            {"engine": Changes(change), "log_probs_every": 1},
            ignore_eos=True,
        )
        for name, change in (("plain", lambda i, c: c), ("spoilt", spoil))
    ]
    assert [row["rollout/logprob_nonfinite_ratio"] for row in spoilt] == pytest.approx([1 / 12, 0.0])
    assert [row["rollout/logprob_nonfinite_ratio"] for row in plain] == [0.0, 0.0]
    assert 0.0 < spoilt[0]["rollout/logprob_diff_mean"] <= spoilt[0]["rollout/logprob_diff_max"] < 1e-4
    measured = {name for name in plain[0] if "logprob" in name or name.split("/")[0] in ("perf", "timing_s")}
    assert {k: v for k, v in plain[0].items() if k not in measured} == {
        k: v for k, v in spoilt[0].items() if k not in measured
    }


# -- a hang ------------------------------------------------------------------------------------------------------------


class Hangs(TransformersEngine):
    """Generates for ever on one rank."""

    def __init__(self, rank: int = 0, holds_the_lock: bool = False) -> None:
        super().__init__()
        self.rank, self.holds_the_lock = rank, holds_the_lock

    def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == self.rank:
            library = (ctypes.PyDLL if self.holds_the_lock else ctypes.CDLL)(None)
            library.sleep(1000)  # a call that Python cannot interrupt
        return super().generate(*args, **kwargs)


def hung_run(*arguments: str, timeout_s: float = 1.0) -> tuple[int, str]:
    """Exit code and stderr of a run whose engine hangs in the first generation."""
    engine = ["--rollout.engine=test_faults.Hangs", f"--rollout.timeout_s={timeout_s}", "--trainer.logger=false"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lightning_rlhf",
            "fit",
            "--config",
            "configs/tiny_grpo.yaml",
            *QUIET,
            *engine,
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_generation_that_hangs_ends_the_process_and_shows_where():
    code, error = hung_run()
    assert code == HUNG
    first = error[error.index("lightning-rlhf: rank") :].splitlines()
    assert first[0].startswith(
        "lightning-rlhf: rank 0: generate of iteration 1 has not ended in 1 s (rollout.timeout_s)"
    )
    assert "test_faults.py" in error
    assert "in generate" in error


@pytest.mark.slow
def test_one_that_holds_the_interpreters_lock_ends_too():
    code, error = hung_run("--rollout.engine.holds_the_lock=true")
    assert code == 1
    assert "Timeout" in error
    assert "in generate" in error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_on_one_of_two_ranks_ends_both(rank):
    start = time.monotonic()
    code, error = hung_run("--trainer.devices=2", f"--rollout.engine.rank={rank}")
    assert time.monotonic() - start < 60
    assert code != 0
    assert f"lightning-rlhf: rank {rank}: generate of iteration 1 has not ended" in error
    assert f"lightning-rlhf: rank {1 - rank}: generate" not in error, "the one that waits is not to blame"


def test_phases_in_time_are_left_alone(tmp_path):
    rows = fit(GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]), tmp_path, 2, {"timeout_s": 60.0})
    assert len(rows) == 2


# -- a failure on one of two ranks -------------------------------------------------------------------------------------


def failures(rank: int) -> list[tuple[str, str, str, float]]:
    """(step, error, cause, seconds) of runs that each fail in another step, on the second rank."""
    faulthandler.dump_traceback_later(150, exit=True)  # a hang fails the test
    callback.gather = partial(gather, bucket_bytes=1)  # a collective per parameter, as with large ones
    told = []
    for step in ("weights", "load", "kv_cache", "generate", "sleep"):
        module = GRPOLightningModule(**TINY_MODULE, reward=[length])
        data = PromptDataModule(path="toys.prompts", batch_size=16, max_prompt_length=32)
        start = time.monotonic()
        try:
            engine = Fails(step, OSError(f"{step} broke"), rank=1)
            fit_data(module, data, 2, engine=engine, offload_parameters=True, verify_sync_every=1)
        except Exception as error:
            told.append((step, f"{type(error).__name__}: {error}", traceback.format_exc(), time.monotonic() - start))
    faulthandler.cancel_dump_traceback_later()
    return told


@pytest.mark.slow
def test_a_failure_in_any_step_on_one_rank_is_raised_on_both_at_once():
    one, other = spawn(failures, 2)
    steps = {
        "weights": "wake weights",
        "load": "sync",
        "kv_cache": "wake kv_cache",
        "generate": "generate",
        "sleep": "sleep",
    }
    assert [step for step, *_ in one] == [step for step, *_ in other] == list(steps)
    for (step, message, _, seconds), (_, own, trace, _) in zip(one, other, strict=True):
        assert own == f"OSError: {step} broke", trace
        assert message == f"RuntimeError: {steps[step]} of iteration 2 failed on rank 1: {own}"
        assert seconds < 30


@pytest.mark.parametrize(("phase", "tp", "waits"), [("generate", 1, True), ("generate", 2, False), ("sync", 2, True)])
def test_a_failure_is_told_unless_others_may_be_inside_the_engine_and_is_raised_though_they_are_gone(
    phase, tp, waits, monkeypatch
):
    told: list[Any] = []

    def gone(message: str | None) -> list[str | None]:
        told.append(message)
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(faults, "of_all_ranks", gone)
    steps: Any = RolloutSteps(RolloutCallback())
    steps.engine = SimpleNamespace(tensor_parallel_size=tp)
    trainer = SimpleNamespace(training=True, fit_loop=SimpleNamespace(total_batch_idx=0))
    steps.module = SimpleNamespace(trainer=trainer, phases=Phases())
    with pytest.raises(ValueError, match="out of blocks"), steps.step(phase):
        raise ValueError("out of blocks")
    assert told == ["ValueError: out of blocks"] * waits


def agree(rank: int) -> list[str]:
    said = []
    for failing in ((), (0,), (1,), (0, 1)):
        try:
            with agreed("the step"):
                if rank in failing:
                    raise ValueError(f"of rank {rank}")
            said.append("")
        except Exception as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_ranks_agree_and_each_raises_its_own_error():
    one, other = spawn(agree, 2)
    assert one == ["", "of rank 0", "the step failed on rank 1: ValueError: of rank 1", "of rank 0"]
    assert other == ["", "the step failed on rank 0: ValueError: of rank 0", "of rank 1", "of rank 1"]
