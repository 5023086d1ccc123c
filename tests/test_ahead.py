"""Responses generated beside the update: one update behind, the same however the threads run, and kept by checkpoints."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import toys
from test_plan import run_of
from toys import TINY_MODULE, even_tokens, fit, quiet_trainer

import lightning_rlhf.callbacks.ahead as ahead_module
from lightning_rlhf import (
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    IterationCheckpoint,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.callbacks.ahead import Ahead
from lightning_rlhf.modules.correction import Correction
from lightning_rlhf.plan.checks import problems
from lightning_rlhf.rollout import TransformersEngine, VLLMEngine
from lightning_rlhf.types import Completion

OWN = ("actor/", "reward", "completions/", "rollout/is", "rollout/logprob", "rollout/staleness")


class Watched(TransformersEngine):
    """Notes the version of the weights, and where each generation ran."""

    def __init__(self, fails_at: int = -1, error: Exception = ValueError("out of blocks")) -> None:  # noqa: B008
        super().__init__()
        self.error = error
        self.versions: list[int] = []
        self.threads: list[str] = []
        self.fails_at, self.closed = fails_at, False

    def generate(self, prompts, sampling, **arguments):
        self.versions.append(self.weight_version)
        self.threads.append(threading.current_thread().name)
        if len(self.versions) - 1 == self.fails_at:
            raise self.error
        return super().generate(prompts, sampling, **arguments)

    def close(self) -> None:
        self.closed = True
        super().close()


class Save(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


class Interrupt(pl.Callback):
    """Ends the first fit in its second iteration, and notes the iterations and what they log of the generation beside them."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.staleness: list[float | None] = []

    def on_train_batch_start(self, trainer, module, *_):
        self.iterations.append(trainer.fit_loop.total_batch_idx)
        self.staleness.append(module.extra_metrics.get("rollout/staleness"))
        if len(self.iterations) == 2:
            raise ValueError("stop here")


class Inline:
    """Stands in for `Thread`: the work is done when it is started."""

    def __init__(self, target: Any, **_: Any) -> None:
        self.start = target

    def join(self) -> None: ...

    def is_alive(self) -> bool:
        return False


def module(**options: Any) -> GRPOLightningModule:
    return GRPOLightningModule(**TINY_MODULE, reward=[even_tokens], correction=Correction(), **options)


def run(folder: Path, iterations: int = 4, engine: Any = None, model: Any = None, **options: Any) -> Any:
    """(metrics of each iteration, weights at the end) of a run that generates ahead."""
    model = model or module()
    rollout = {"engine": engine or TransformersEngine(), "async_level": options.pop("async_level", 1)}
    rows = fit(model, folder, iterations, rollout, num_generations=4, **options)
    own = [{name: value for name, value in row.items() if name.startswith(OWN)} for row in rows]
    return own, {name: p.full_tensor().clone() for name, p in model.actor.named_parameters()}


def assert_equal(left: Any, right: Any, since: int = 0) -> None:
    assert left[0][since:] == right[0]
    assert all(torch.equal(tensor, right[1][name]) for name, tensor in left[1].items())


def test_responses_are_one_update_behind_and_none_are_drawn_in_vain(tmp_path):
    engine = Watched()
    rows, _ = run(tmp_path / "ahead", engine=engine)
    assert engine.versions == [0, 0, 1, 2]
    assert engine.threads == ["MainThread", *["generate ahead"] * 3]
    assert [row.get("rollout/staleness") for row in rows] == [None, 1.0, 1.0, 1.0]
    assert rows[0]["rollout/logprob_diff_max"] < 1e-4 < rows[1]["rollout/logprob_diff_max"]
    assert rows[0]["rollout/is_ess"] > 1 - 1e-6 > rows[2]["rollout/is_ess"] > 0.9
    engine = Watched()
    run(tmp_path / "plain", engine=engine, async_level=0)
    assert engine.versions == [0, 1, 2, 3]


def test_a_fit_after_one_that_was_interrupted_goes_on_at_the_iteration_that_was_not_finished():
    pl.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    notes, engine = Interrupt(), Watched()
    sampling = {"num_generations": 2, "max_completion_length": 6}
    rollout = RolloutCallback(engine, sampling, async_level=1)
    trainer = quiet_trainer(rollout, notes, max_steps=4, log_every_n_steps=1, enable_checkpointing=False)
    data, model = PromptDataModule("toys.prompts", batch_size=4, max_prompt_length=32), module()
    with pytest.raises(ValueError, match="stop here"):
        trainer.fit(model, data)
    begun = len(engine.versions)
    trainer.fit(model, data)
    assert notes.iterations == [0, 1, 1, 2, 3]
    assert notes.staleness == [None, 1.0, None, 1.0, 1.0]
    assert len(engine.versions) - begun == 3  # none in vain


def test_a_run_is_the_same_without_threads(tmp_path, monkeypatch):
    beside = run(tmp_path / "beside")
    monkeypatch.setattr(ahead_module, "Thread", Inline)
    assert_equal(beside, run(tmp_path / "inline"))


def test_generation_runs_beside_the_update(tmp_path):
    """Each waits for the other to have begun: one after the other they would never end."""
    updating, generating = threading.Event(), threading.Event()

    class Waits(TransformersEngine):
        def generate(self, prompts, sampling, **arguments):
            if threading.current_thread() is not threading.main_thread():
                generating.set()
                assert updating.wait(60)
                updating.clear()
            return super().generate(prompts, sampling, **arguments)

    class Meets(GRPOLightningModule):
        def update(self, experience):
            if self.trainer.global_step < 2:
                assert generating.wait(60)
                generating.clear()
                updating.set()
            return super().update(experience)

    model = Meets(**TINY_MODULE, reward=[even_tokens], correction=Correction())
    assert len(run(tmp_path, 3, Waits(), model)[0]) == 3


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log", "ignore:more than half of the responses")
def test_a_validation_waits_for_the_generation_beside_the_update_and_the_last_epoch_has_no_next_one():
    class Alone(Watched):
        lock = threading.Lock()

        def generate(self, prompts, sampling, **arguments):
            assert self.lock.acquire(blocking=False), "two at once"
            try:
                if threading.current_thread() is not threading.main_thread():
                    assert begun.wait(60)
                    time.sleep(0.3)
                return super().generate(prompts, sampling, **arguments)
            finally:
                self.lock.release()

    class Begins(pl.Callback):
        def on_validation_start(self, *_):
            begun.set()

    engine, begun = Alone(), threading.Event()
    rollout = RolloutCallback(engine, Sampling(num_generations=2, max_completion_length=4), async_level=1)
    options = {"max_epochs": 1, "val_check_interval": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    data = toys.PromptDataModule(path="toys.prompts", batch_size=8, val_size=16)
    toys.quiet_trainer(Begins(), rollout, **options).fit(module(), datamodule=data)
    assert engine.threads.count("generate ahead") == 1


def test_a_resumed_run_trains_on_the_responses_that_the_checkpoint_holds(tmp_path):
    whole = run(tmp_path / "whole", callbacks=[Save(tmp_path / "ck")])
    engine = Watched()
    rest = run(tmp_path / "rest", engine=engine, ckpt_path=str(tmp_path / "ck"))
    assert_equal(whole, rest, since=2)
    assert engine.versions == [1]  # for iteration 3, after one update here: those of iteration 2 were there
    assert rest[0][0]["rollout/staleness"] == 1.0


def test_other_data_or_no_async_level_leave_the_responses_of_a_checkpoint_alone(tmp_path, monkeypatch):
    run(tmp_path / "whole", callbacks=[Save(tmp_path / "ck")])
    engine = Watched()
    run(tmp_path / "plain", engine=engine, async_level=0, ckpt_path=str(tmp_path / "ck"))
    assert engine.threads == ["MainThread"] * 2
    engine = Watched()
    greedy = module(advantage="remax")  # one more response to each prompt
    rows, _ = run(tmp_path / "other", 3, engine, greedy, ckpt_path=str(tmp_path / "ck"))
    assert engine.threads == ["MainThread"]
    assert "rollout/staleness" not in rows[0]
    engine = Watched()
    rows, _ = run(tmp_path / "cooler", 3, engine, ckpt_path=str(tmp_path / "ck"), temperature=0.5)
    assert engine.threads == ["MainThread"]
    assert "rollout/staleness" not in rows[0]
    others = [{**row, "prompt": row["prompt"] + "now "} for row in toys.prompts()]  # as many, in the same rows
    monkeypatch.setattr(toys, "prompts", lambda: others)
    engine = Watched()
    with pytest.warns(UserWarning, match="data: the checkpoint was written with fingerprint"):
        rows, _ = run(tmp_path / "data", 3, engine, ckpt_path=str(tmp_path / "ck"))
    assert engine.threads == ["MainThread"]
    assert "rollout/staleness" not in rows[0]


def test_a_failure_beside_the_update_ends_the_run_and_frees_the_engine(tmp_path):
    engine = Watched(fails_at=2)
    with pytest.raises(ValueError, match="out of blocks"):
        run(tmp_path / "a", engine=engine)
    assert engine.closed
    assert len(engine.versions) == 3
    full = Watched(1, torch.OutOfMemoryError("Tried to allocate 2.50 GiB."))
    settings = r"lower rollout\.engine\.batch_size, set rollout\.async_level: 0 or shard over more trainer\.devices"
    with pytest.raises(torch.OutOfMemoryError, match=rf"^generate of iteration 2 ran out of .* {settings}$"):
        run(tmp_path / "b", engine=full)


def test_the_checkpoint_that_is_due_is_written_before_a_failure_beside_the_update_is_raised(tmp_path):
    keep = IterationCheckpoint(tmp_path / "kept", every_n_train_steps=1)
    with pytest.raises(ValueError, match="out of blocks"):
        run(tmp_path / "a", engine=Watched(fails_at=2), callbacks=[keep])
    assert [path.name for path in (tmp_path / "kept").iterdir() if path.suffix == ".ckpt"] == ["iteration-000002.ckpt"]
    engine = Watched()
    again = IterationCheckpoint(tmp_path / "kept", every_n_train_steps=1)
    rows, _ = run(tmp_path / "b", engine=engine, ckpt_path=keep.best_model_path, callbacks=[again])
    assert engine.threads == ["MainThread", "generate ahead"]
    assert [row.get("rollout/staleness") for row in rows] == [None, 1.0]


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log", "ignore:more than half of the responses")
def test_so_is_one_that_waits_for_a_metric_of_the_validation(tmp_path):
    keep = IterationCheckpoint(
        tmp_path / "kept", "{step}", 1, monitor="val/heldout/reward", mode="max", save_last=False
    )
    rollout = RolloutCallback(Watched(fails_at=3), Sampling(num_generations=2, max_completion_length=4), async_level=1)
    waits = []

    class Asks(pl.Callback):
        def on_validation_start(self, *_):
            waits.append(keep.waits_for_validation)

        def on_train_batch_start(self, *_):
            waits.append(keep.waits_for_validation)

    options = {"max_epochs": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
    data = toys.PromptDataModule(path="toys.prompts", batch_size=8, val_size=8)
    with pytest.raises(ValueError, match="out of blocks"):
        toys.quiet_trainer(Asks(), rollout, keep, **options).fit(module(), datamodule=data)
    assert waits == [False, True, False, True]
    assert {path.name for path in (tmp_path / "kept").iterdir()} - {"manifest.json"} == {"1.ckpt", "last.ckpt"}


def failed_on_the_second(rank: int, folder: str) -> str:
    """The error of a run whose generation for iteration 3 fails on the second of two ranks."""
    engine = Watched(fails_at=2 if rank else -1)
    rollout = RolloutCallback(engine, Sampling(num_generations=2, max_completion_length=4), async_level=1)
    keep = IterationCheckpoint(folder, every_n_train_steps=1)
    data = toys.PromptDataModule(path="toys.prompts", batch_size=8)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of each its own)
        toys.quiet_trainer(rollout, keep, devices=2, max_steps=4).fit(module(), datamodule=data)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:more than half of the responses")
def test_a_failure_beside_the_update_of_one_rank_is_raised_on_both_when_the_checkpoint_is_written(tmp_path):
    said = "generate of iteration 2 failed on rank 1: ValueError: out of blocks"
    assert toys.spawn(failed_on_the_second, 2, str(tmp_path)) == [said, "out of blocks"]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt"] == ["iteration-000002.ckpt"]


@pytest.mark.parametrize(
    ("error", "ends", "said"),
    [
        (ZeroDivisionError("of the update"), ZeroDivisionError, "ZeroDivisionError: of the update;"),
        (KeyboardInterrupt(), SystemExit, "KeyboardInterrupt;"),
    ],
)
def test_a_failing_update_waits_for_the_engine_before_it_closes_it_and_says_so(error, ends, said, tmp_path, caplog):
    running, seen = threading.Event(), []

    class Slow(Watched):
        def generate(self, prompts, sampling, **arguments):
            if self.versions:
                running.set()
                assert released.wait(60)
            return super().generate(prompts, sampling, **arguments)

        def close(self) -> None:
            seen.append(len(self.versions))
            super().close()

    class Fails(GRPOLightningModule):
        def update(self, experience):
            assert running.wait(60)
            threading.Timer(0.2, released.set).start()
            raise error

    released = threading.Event()
    model = Fails(**TINY_MODULE, reward=[even_tokens], correction=Correction())
    with pytest.raises(ends):
        run(tmp_path, engine=Slow(), model=model)
    assert seen[0] == 2
    assert f"{said} the engine is closed once the generation under way has ended" in caplog.text


def test_ctrl_c_while_a_run_waits_for_its_responses_closes_the_engine_when_these_are_there(tmp_path, monkeypatch):
    done = []

    class Slow(Watched):
        def generate(self, prompts, sampling, **arguments):
            if threading.current_thread() is not threading.main_thread():
                assert released.wait(60)
                time.sleep(0.3)
            try:
                return super().generate(prompts, sampling, **arguments)
            finally:
                done.append("generated")

        def close(self) -> None:
            done.append("closed")
            super().close()

    def interrupted(running):
        released.set()
        raise KeyboardInterrupt

    released = threading.Event()
    monkeypatch.setattr(ahead_module._Running, "result", interrupted)
    with pytest.raises(SystemExit):
        run(tmp_path, engine=Slow())
    assert done == ["generated", "generated", "closed"]


def test_ctrl_c_ends_the_generation_beside_the_update_between_two_of_its_steps():
    """Of 200 tokens."""
    steps, begun, at = [0], threading.Event(), [0]

    class Counts(TransformersEngine):
        def _forward(self, *args, **arguments):
            if threading.current_thread() is not threading.main_thread():
                steps[0] += 1
                begun.set()
                time.sleep(0.05)
            return super()._forward(*args, **arguments)

    class Interrupted(GRPOLightningModule):
        def update(self, experience):
            assert begun.wait(60)
            at[0] = steps[0]
            raise KeyboardInterrupt

    sampling = Sampling(num_generations=2, max_completion_length=200, ignore_eos=True)
    rollout = RolloutCallback(Counts(), sampling, async_level=1)
    model = Interrupted(**TINY_MODULE, reward=[even_tokens], correction=Correction())
    data = toys.PromptDataModule(path="toys.prompts", batch_size=2)
    with pytest.raises(SystemExit):
        toys.quiet_trainer(rollout, max_steps=2, enable_checkpointing=False).fit(model, datamodule=data)
    assert at[0] <= steps[0] < at[0] + 20


@pytest.mark.parametrize("error", [None, ValueError("no"), SystemExit(3)])
def test_a_thread_leaves_its_time_and_what_it_made_or_raised(error):
    def generate() -> list[Completion]:
        time.sleep(0.05)
        if error is not None:
            raise error
        return [Completion([5], "stop")]

    ahead = Ahead()
    ahead.start(3, [8], generate, torch.device("cpu"))
    assert ahead.running
    if error is None:
        ahead.settle(lambda result: result())
        assert ahead.seconds >= 0.05
        assert ahead.take([8]) == [Completion([5], "stop")]
    else:
        with pytest.raises(type(error)):
            ahead.settle(lambda result: result())
    assert not ahead.running


def twice(device: torch.device, generate: Any) -> None:
    for iteration in range(2):
        ahead = Ahead()
        ahead.start(iteration, [8], generate, device)
        ahead.settle(lambda result: result())


def test_all_generations_take_one_stream_and_end_with_its_work(monkeypatch):
    """torch keeps memory for each stream that was ever used."""
    done = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            done.append(f"made {priority}")

        def synchronize(self) -> None:
            done.append("waited")

    for name, value in (("Stream", Stream), ("stream", nullcontext), ("set_device", lambda device: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    ahead_module._stream.cache_clear()
    twice(torch.device("cuda", 0), lambda: done.append("generated") or [])
    ahead_module._stream.cache_clear()
    assert done == ["made -1", *["generated", "waited"] * 2]


@pytest.mark.gpu
def test_the_stream_of_all_generations_is_idle_after_each():
    streams = []

    def generate() -> list[Completion]:
        streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(10**8)
        return []

    twice(torch.device("cuda", 0), generate)
    assert streams[0].cuda_stream == streams[1].cuda_stream != torch.cuda.current_stream().cuda_stream
    assert streams[0].query()
    assert streams[0].priority == -1


def test_responses_survive_a_checkpoint_to_the_bit():
    ahead, again = Ahead(), Ahead()
    rows = {
        7: [Completion([1, 2], "stop", [-0.1, -1e-9]), Completion([], "abort", [])],
        3: [Completion([5], "length", [-3.0])] * 2,
    }
    ahead.iteration, ahead._rows = 4, rows
    state = ahead.state(lambda own: [own, {9: [Completion([8], "stop", [0.0])] * 2}])
    again.load(state)
    assert again.iteration == 4
    assert again.has([3, 7, 9], 2)
    assert not again.has([3, 8], 2)
    assert not again.has([3, 7], 3)
    assert again.take([3, 7]) == [*rows[3], *rows[7]]
    assert again.iteration == -1
    assert again.state(lambda own: [own]) == {}
    ahead._rows = {1: [Completion([1], "stop")]}
    again.load(ahead.state(lambda own: [own]))
    assert again.take([1]) == [Completion([1], "stop", None)]


def test_what_cannot_be_generated_ahead_is_refused(tmp_path):
    for option in ({"sleep_level": 2}, {"offload_optimizer": True}, {"offload_parameters": True}):
        with pytest.raises(ValueError, match="keeps the engine awake beside the trainer: leave out sleep_level"):
            RolloutCallback(async_level=1, **option)

    def errors(**run: Any) -> list[str]:
        return [problem.message for problem in problems(run_of(**run)) if problem.kind == "error"]

    assert not errors(async_level=1, corrected=True)
    (message,) = errors(async_level=1)
    assert message.endswith("set model.correction, {} for its defaults")
    two = {"strategy": FSDPUlyssesStrategy(), "world_size": 2, "num_nodes": 1}
    (message,) = errors(async_level=1, corrected=True, engine=VLLMEngine(tensor_parallel_size=2), **two)
    assert "got rollout.engine.tensor_parallel_size=2: set it to 1, or async_level to 0" in message
    (message,) = errors(corrected=True, replayable=False)
    assert "set rollout.sampling.top_p to 1" in message

    trainer = pl.Trainer(barebones=True)
    trainer.fit_loop._combined_loader = None
    callback = RolloutCallback(async_level=1, sampling=Sampling(num_generations=2))
    with pytest.raises(ValueError, match="must know the next batch before it is due: use PromptDataModule"):
        callback.on_train_start(trainer, module())
