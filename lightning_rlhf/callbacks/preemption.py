"""A machine that is taken away, and a job that is started again.

A signal on ANY rank is noted, nothing else happens at that moment. The ranks compare notes at the end of each iteration and of
each validation: if one of them was told, all save a checkpoint, stop and exit with `PREEMPTED`.

    SIGTERM             of torchrun, Kubernetes, spot machines, scancel
    SIGUSR1, SIGUSR2    under SLURM (``#SBATCH --signal=USR1@300``): the job is queued again, too

A second signal of the same kind ends the process at once. Lightning's own handlers are taken off: they call collectives, and
save checkpoints, in the middle of whatever their rank does, while the others do something else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rlhf import restricted, storage
from lightning_rlhf.callbacks.checkpoint import IterationCheckpoint, folders_of_versions
from lightning_rlhf.callbacks.watchdog import started_by_rank_zero

PREEMPTED = 143
"""Exit code after a signal and a complete checkpoint: 128 + SIGTERM, as of a process that the signal ended."""

_STOP, _REQUEUE = 1, 2
_ONE_EVENT_S = 3.0
"""A launcher hands on the signal that its whole process group got: within this time it is the same one."""
_JOB = "job"
"""Key of a checkpoint's metadata."""


class Preemption(Checkpoint):
    """Saves with every `IterationCheckpoint` and stops when a signal says so; without one a signal ends the run as ever.

    A `Checkpoint`, for Lightning calls those after all other callbacks: what is saved has seen the whole iteration.
    """

    def __init__(self) -> None:
        self._asked = self._agreed = 0
        self._heard: dict[int, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        connector = _without_handlers(trainer)
        if not _savers(trainer):
            return
        self._asked, self._heard, self._rank = 0, {}, trainer.global_rank
        signals = [signal.SIGTERM]
        if "SLURM_JOB_ID" in os.environ:
            signals += [s for s in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(s) is signal.SIG_DFL]
        self._before: dict[Any, Any] = {s: signal.getsignal(s) for s in signals}
        connector._original_handlers |= self._before  # Lightning puts them back when fit ends, however it does
        for one in signals:
            connector._register_signal(one, self._hear)  # in the main thread only

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # nothing to save
            _without_handlers(trainer)

    on_test_start = on_validation_start

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._stop_if_asked(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[_JOB] = job()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        where = ", ".join(str(c._last_checkpoint_saved) for c in _savers(trainer) if c._last_checkpoint_saved)
        if isinstance(exception, KeyboardInterrupt) and trainer.training and trainer.is_global_zero:
            _say(f"interrupted after iteration {trainer.global_step}, what is saved: {where or 'nothing'}")
        if not isinstance(exception, SIGTERMException):
            return
        # Lightning's first process would be ended for a failure of one that it started
        exception.code = 0 if started_by_rank_zero(trainer) else PREEMPTED
        if trainer.is_global_zero:
            _say(f"iteration {trainer.global_step} is saved in {where}, stopping")
            environment = getattr(trainer.strategy, "cluster_environment", None)
            wanted = getattr(environment, "auto_requeue", True)  # of Lightning's SLURMEnvironment
            if self._agreed == _REQUEUE and wanted:
                _requeue()

    def _hear(self, number: int, frame: Any) -> None:
        before, now = self._before[signal.Signals(number)], time.monotonic()
        if now - self._heard.setdefault(number, now) > _ONE_EVENT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._asked:
            name = signal.Signals(number).name
            _say(f"rank {self._rank}: {name}, saving when the iteration ends; once more ends at once")
        self._asked = max(self._asked, _STOP if number == signal.SIGTERM else _REQUEUE)
        if callable(before):
            before(number, frame)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        savers = _savers(trainer)
        if not savers or savers[0].is_last_iteration(trainer):
            return
        asked = torch.tensor(self._asked, device=trainer.strategy.root_device)
        self._agreed = int(trainer.strategy.reduce(asked, reduce_op="max"))  # a signal may come meanwhile
        if self._agreed:
            for saver in savers:
                saver.save_now(trainer)
            # Lightning logs the iteration's metrics, then raises SIGTERMException; a validation would take the time that is left
            trainer._signal_connector.received_sigterm = True
            trainer.fit_loop.epoch_loop._skip_next_val = True


def _savers(trainer: pl.Trainer) -> list[IterationCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, IterationCheckpoint)]


def _without_handlers(trainer: pl.Trainer) -> Any:
    """Lightning's keeper of handlers, its own taken off. It still puts back that of Ctrl-C, which it ignores after the first."""
    connector = trainer._signal_connector
    connector.teardown()
    connector._original_handlers = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
    return connector


def _say(text: str) -> None:
    os.write(2, f"lightning-rlhf: {text}\n".encode())  # a handler may have interrupted a write to sys.stderr


def _requeue() -> None:
    """Ask SLURM to queue the job again, which ends this one."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job_id], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _say(f"job {job_id} could not be queued again ({error}): run `scontrol requeue {job_id}`")


# -- a job that is started again ---------------------------------------------------------------------------------------


def restarts() -> int:
    """How often torchrun or SLURM has started this job again."""
    return max(int(os.environ.get(f"{launcher}_RESTART_COUNT", 0)) for launcher in ("TORCHELASTIC", "SLURM"))


def job() -> str | None:
    """What all attempts of a job, and no other job, have in common; None if there are no attempts."""
    environment = os.environ
    if "SLURM_JOB_ID" in environment:
        return f"slurm {environment['SLURM_JOB_ID']}"
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is not None and environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE"):
        # one torchrun: its folder of logs, FOLDER/RUN_random/attempt_0/0/error.json; its run may have no name
        logs = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parents
        run = logs[2].name if len(logs) > 2 else run
    return None if run is None else f"torchrun {run}"


def checkpoint_of_job(trainer: pl.Trainer) -> str | None:
    """The newest complete checkpoint that an earlier attempt of this job wrote and whose files are as long as they were.

    Before there is a process group: all ranks look at the same files, and the strategy loads what rank 0 found.

    Raises:
        DamagedCheckpoint: all that there are have lost something.
    """
    damaged: dict[str, restricted.DamagedCheckpoint] = {}
    for saver in _savers(trainer):
        for folder in folders_of_versions(saver.folder(trainer)):
            for path in storage.newest_first(folder):
                try:
                    if restricted.read_marker(path, trusted=False).get(_JOB) != job():
                        break
                    restricted.read(path, trusted=False)
                except (FileNotFoundError, restricted.UntrustedCheckpoint):  # of another strategy, of another run
                    break
                except restricted.DamagedCheckpoint as error:
                    damaged[path] = error
                    continue
                if damaged:
                    rank_zero_warn(f"damaged: {', '.join(damaged)}; this attempt goes on from the older {path}")
                return path
    if damaged:
        raise next(iter(damaged.values()))
    return None
