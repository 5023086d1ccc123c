"""No run hangs: what does not end in time ends its process, under a line that names rank and step and above all stacks.

    watched     one step with a limit of its own: those of a rollout (``rollout.timeout_s``)
    Watchdog    everything else of a fit, a validation or a test; and a process whose launcher is gone

No exception: a call that hangs inside CUDA, NCCL or C++ cannot be interrupted from Python, and an exception would be delivered
when it returns, which is never. The launcher ends the other ranks. A rank that waits for others in a collective is not to blame
and left to the time-out of that; one at a breakpoint is left alone.

A call that holds the interpreter's lock stops the thread that watches, too. `faulthandler` has one in C that needs no lock: it
writes the stacks, without that line, a few seconds later and exits with 1. (There is one of those per process: yours, if you
started it, is cancelled.)
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from jsonargparse.typing import PositiveFloat
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_rlhf.runners import at_breakpoint, files_of

HUNG = 124
"""Exit code of a process that hung: that of timeout(1)."""
ORPHANED = 125
"""Exit code of a process whose launcher is gone."""

_GRACE = 5.0
_BOTH_END = 3.0
"""Seconds between the ends of a launcher and of its processes when a run is complete."""
_TICK = 0.5
_SHARE = 2 / 3
"""Of the limit of collectives: a rank that hangs must say so before the others give up waiting for it."""
_ROLLOUT = ("generate", "sync", "wake", "sleep", "offload", "reload")
_ROLLOUT_TIMES = 6
"""How much longer the steps of a rollout may take: nothing is heard of an engine until all responses are there."""
_WAITS = "distributed_c10d.py"


@dataclass(eq=False)
class _Step:
    what: str
    seconds: float
    setting: str

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds


class _Watch:
    """The thread that watches this process's steps, from the first one on."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._lock = threading.RLock()  # or the thread would arm what has just been called off
        self._thread: threading.Thread | None = None
        self.parent: int | None = None

    def add(self, step: _Step) -> None:
        with self._lock:
            self._steps.append(step)
            self._arm()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def remove(self, step: _Step) -> None:
        with self._lock:
            if step in self._steps:
                self._steps.remove(step)
            self._arm()

    def _arm(self) -> None:
        """The watch in C, which ends the process if this is not called again in time."""
        if self._steps:
            left = min(step.end for step in self._steps) - time.monotonic()
            faulthandler.dump_traceback_later(max(left, _TICK) + _GRACE, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while True:
            if self._steps and self.parent not in (None, os.getppid()):
                time.sleep(_BOTH_END)
                if self._steps:
                    _end(ORPHANED, f"process {self.parent}, which started it, is gone")
            late = [step for step in self._steps if step.end < time.monotonic()]
            if late and not _is_in_no_hurry():
                step = late[-1]
                _end(HUNG, f"{step.what} has not ended in {step.seconds:g} s ({step.setting}), all threads:")
            with self._lock:
                if self._steps:
                    self._arm()
            time.sleep(_TICK)


_watch = _Watch()


@contextmanager
def watched(what: str, seconds: float | None) -> Iterator[None]:
    """A step of a rollout that may take ``seconds``; None: any time, at no cost."""
    if seconds is None:
        yield
        return
    step = _Step(what, seconds, "rollout.timeout_s")
    _watch.add(step)
    try:
        yield
    finally:
        _watch.remove(step)


def must_end(what: str, seconds: float) -> None:
    """From now on this process has ``seconds`` left to end by itself."""
    _watch.add(_Step(what, seconds, "no setting"))


class Watchdog(pl.Callback):
    """Ends a process of which nothing is heard: no phase that begins or ends, no micro-batch, no batch of a validation.

    Args:
        timeout_s: seconds; null takes two thirds of ``trainer.strategy.timeout_minutes``. A step of a rollout, whose engine is
            not heard of before it has all responses, may take six times as long.
    """

    def __init__(self, timeout_s: PositiveFloat | None = None) -> None:
        self.timeout_s = timeout_s
        self._step: _Step | None = None

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        by_torchrun = isinstance(getattr(trainer.strategy, "cluster_environment", None), TorchElasticEnvironment)
        launched = by_torchrun or started_by_rank_zero(trainer)
        _watch.parent = os.getppid() if launched else None
        limit: timedelta = getattr(trainer.strategy, "_timeout", None) or timedelta(minutes=30)
        self._limit = self.timeout_s or _SHARE * limit.total_seconds()
        self._setting = "Watchdog.timeout_s" if self.timeout_s else "2/3 of trainer.strategy.timeout_minutes"
        self._trainer, self._over = trainer, False
        if (phases := getattr(pl_module, "phases", None)) is not None and self._phase_starts not in phases.on_start:
            phases.on_start.append(self._phase_starts)
            phases.on_end.append(self._phase_ends)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._expect(f"a callback or the next batch after {where(trainer)}")

    on_validation_start = on_test_start = on_train_start
    on_train_batch_end = on_train_start  # type: ignore[assignment]
    on_validation_batch_end = on_test_batch_end = on_train_start  # type: ignore[assignment]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._expect(f"a callback at the start of {where(trainer)}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._step is not None:
            self._step.end = time.monotonic() + self._step.seconds

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._over = True
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._over = True
        self._stop()

    def _phase_starts(self, name: str) -> None:
        if self._trainer.state.stage is None:  # called by the user, outside of any run
            return
        times = _ROLLOUT_TIMES if name in _ROLLOUT else 1
        self._expect(f"{name} of {where(self._trainer)}", self._limit * times)

    def _phase_ends(self, name: str) -> None:
        if self._over:  # as that of a checkpoint which other callbacks bring to its end
            self._stop()
        else:
            self._expect(f"what follows {name} of {where(self._trainer)}")

    def _expect(self, what: str, seconds: float | None = None) -> None:
        self._stop()
        self._step = _Step(what, seconds or self._limit, self._setting)
        _watch.add(self._step)

    def _stop(self) -> None:
        if self._step is not None:
            _watch.remove(self._step)
            self._step = None


def started_by_rank_zero(trainer: pl.Trainer) -> bool:
    """Whether Lightning's first process on this machine started this one."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


def where(trainer: pl.Trainer) -> str:
    """In which iteration, counted from 1, a trainer is."""
    if trainer.training:
        return f"iteration {trainer.fit_loop.total_batch_idx + 1}"
    return f"{trainer.state.stage.value} at iteration {trainer.global_step}"  # type: ignore[union-attr]


def _end(code: int, text: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.write(2, f"lightning-rlhf: rank {rank}: {text}\n".encode())  # a thread that hangs may hold sys.stderr's lock
    if code == HUNG:
        faulthandler.dump_traceback(file=2)
    os._exit(code)


def _is_in_no_hurry() -> bool:
    """Whether the main thread waits for other ranks or any is at a breakpoint."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _WAITS in files_of(frame) or at_breakpoint()
