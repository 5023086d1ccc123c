"""Checkpoints that count iterations.

Lightning's `ModelCheckpoint` in manual optimisation never looks at ``train_time_interval``, warns that it saves after
the optimizer step (which is what is wanted here), and offers checkpoints of the end of an epoch, which do not resume
cleanly when ``max_steps`` is set. `IterationCheckpoint` saves where a run resumes bit for bit: after a training batch
or after a validation loop.

A checkpoint that the file system does not take ends no run (under `FSDPUlyssesStrategy`, whose ranks agree on it): there is
a warning, the checkpoints before it stay, and the next one is tried when it is due. Only one that is missing at the end of
the run is an error.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from fsspec.core import url_to_fs
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rlhf import storage
from lightning_rlhf.callbacks.manifest import write_manifest


class IterationCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` whose steps are iterations; the run's last iteration is always saved.

    ``Trainer.fit(ckpt_path="last")`` resumes from the latest complete checkpoint in the folder, however it came about.
    Beside the checkpoints and in the logger's folder ``manifest.json`` says what the run is (`callbacks.manifest`).

    Args:
        dirpath: folder, local or remote; None takes ``checkpoints`` in the logger's folder.
        filename: name without extension; ``{step}`` is the iteration, any logged metric may be named.
        every_n_train_steps: save every so many iterations; 100 if no time interval is given either.
        train_time_interval: save when this much time has passed since the last save, at the end of the iteration.
        monitor: metric that decides which checkpoints are kept; None keeps the latest.
        mode: "min" or "max" of ``monitor``.
        save_top_k: how many are kept, -1 for all.
        save_last: also keep the latest as ``last``; None does so if ``monitor`` is set.
        save_weights_only: leave out what is needed to resume.
        verbose: report each save.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "iteration-{step:06d}",
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool | Literal["link"] | None = None,
        save_weights_only: bool = False,
        verbose: bool = False,
    ) -> None:
        if every_n_train_steps is None and train_time_interval is None:
            every_n_train_steps = 100
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=monitor is not None if save_last is None else save_last,
            save_weights_only=save_weights_only,
            verbose=verbose,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
        )
        self._found: str | None = None
        self._failure: storage.SaveFailed | None = None
        self._ending = False

    def _ModelCheckpoint__warn_if_dir_not_empty(self, dirpath: Any) -> None:
        """That is what resuming looks like."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._found is not None and trainer.ckpt_path is None:  # Lightning asks again, and takes an error for a no
            raise ConnectionError(f"{self._found!r} was found and then not: the file system fails, start the run again")
        self._found, self._ending = None, False
        super().on_train_start(trainer, pl_module)
        folder = trainer.log_dir if trainer.loggers else None  # a collective: all ranks
        if trainer.is_global_zero and hasattr(pl_module, "description") and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_manifest(trainer, pl_module, [f for f in (self.dirpath, folder) if f is not None])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with _ignored("The dirpath has changed from"):  # as it does with each new version of a logger's folder
            super().load_state_dict(state_dict)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not (self._is_due(trainer) or self.is_last_iteration(trainer)):
            return
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        if self.monitor is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher):
            self._defer_save_until_validation = True  # the metric is about to be renewed
            return
        self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        if _stops_early(trainer):
            self._save(trainer)

    def save_now(self, trainer: pl.Trainer) -> None:
        """Save this iteration, due or not, as ``last`` if it is not among those that are kept. Collective.

        Raises:
            SaveFailed: it could not be written.
        """
        given, self.save_last = self.save_last, self.save_last or self.monitor is not None or self.save_top_k == 0
        self.on_train_end(trainer, trainer.lightning_module)
        self.save_last = given

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._ending = True
        self._save(trainer)
        if self._failure is not None and self._last_global_step_saved != trainer.global_step:
            raise self._failure

    def _is_due(self, trainer: pl.Trainer) -> bool:
        every, interval = self._every_n_train_steps, self._train_time_interval
        if interval is None:
            return every >= 1 and trainer.global_step % every == 0
        assert self._last_time_checked is not None
        late = time.monotonic() - self._last_time_checked >= interval.total_seconds()
        return trainer.strategy.broadcast(late)  # rank 0 decides, clocks differ

    @staticmethod
    def is_last_iteration(trainer: pl.Trainer) -> bool:
        """Whether the run ends with it."""
        last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        enough = 0 <= trainer.max_steps <= trainer.global_step
        return enough or (last_epoch and trainer.is_last_batch) or _stops_early(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        if self.monitor is None or self.monitor in candidates:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)
        self._last_time_checked = time.monotonic()

    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._going_on():
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._going_on():
            super()._save_last_checkpoint(trainer, monitor_candidates)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """If the checkpoint cannot be written, what is known of the earlier ones stays as it was."""
        known = {name: copy(value) for name, value in self.state_dict().items()}
        try:
            yield
        except storage.SaveFailed as failure:
            vars(self).update(known)
            self._failure = failure
            if not self._ending:  # then it is raised
                rank_zero_warn(
                    f"{failure}. The run goes on with the checkpoints it has, the next is tried when it is due"
                )

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        with trainer.lightning_module.phases("checkpoint"):  # type: ignore[operator]
            super()._save_checkpoint(trainer, filepath)
        self._failure = None

    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        try:
            return storage.on_rank_zero(lambda: storage.exists(str(filepath)))
        except OSError as error:
            raise storage.failure(error, str(filepath)) from error  # type: ignore[misc]

    def folder(self, trainer: pl.Trainer) -> str:
        """Where it saves."""
        return str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        latest = next(latest_of_versions(self.folder(trainer)), None)
        if latest is None:
            return set()
        if trainer.state.fn == TrainerFn.FITTING:
            self._found = latest
        if not _is_local_file_protocol(latest):  # Lightning asks for its time, and stores know none of folders
            marker = f"{latest}/{storage.MARKER}"
            return {marker if storage.exists(marker) else latest}
        return {latest}


def latest_of_versions(folder: str) -> Iterator[str]:
    """The newest checkpoint of a folder, then of each earlier run of a logger: ``folder`` is .../name/version_7/checkpoints."""
    if own := latest_complete(folder):
        yield own
    parts = re.fullmatch(r"(.+)/version_\d+/([^/]+)", folder.rstrip("/"))
    if parts is None:
        return
    name, inside = parts[1], parts[2]
    numbers = [path.rpartition("version_")[2] for path, _ in storage.listed(name)]
    for number in sorted((int(n) for n in numbers if n.isdigit()), reverse=True):
        if latest := latest_complete(f"{name}/version_{number}/{inside}"):
            yield latest


def latest_complete(dirpath: str) -> str | None:
    """The newest checkpoint in a local or remote folder that was written to its end, None if there is none.

    A sharded checkpoint is a folder whose metadata file is written last; one without it was interrupted.
    """
    finished = dict(storage.complete_in(dirpath))
    if not finished:
        return None
    latest = max(finished, key=finished.__getitem__)
    return latest if _is_local_file_protocol(dirpath) else url_to_fs(dirpath)[0].unstrip_protocol(latest)


def _stops_early(trainer: pl.Trainer) -> bool:
    return trainer.should_stop and trainer.fit_loop._can_stop_early


@contextmanager
def _ignored(message: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield
