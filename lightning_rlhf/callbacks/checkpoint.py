"""Checkpoints that count iterations.

Lightning's `ModelCheckpoint` in manual optimisation never looks at ``train_time_interval``, warns that it saves after
the optimizer step (which is what is wanted here), and offers checkpoints of the end of an epoch, which do not resume
cleanly when ``max_steps`` is set. `IterationCheckpoint` saves where a run resumes bit for bit: after a training batch
or after a validation loop.

A checkpoint that the file system does not take ends no run (under `FSDPUlyssesStrategy`, whose ranks agree on it): there is
a warning, the checkpoints before it stay, and the next one is tried when it is due. Only one that is missing at the end of
the run is an error.

A save is noted first and carried out then, at once or beside the run (``async_save``):

    state of the run ─▶ write ─▶ complete ─▶ older ones are removed, ``last`` is made of the same files
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import proxy

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rlhf import storage
from lightning_rlhf.callbacks.disk import warn_of_little_space
from lightning_rlhf.callbacks.manifest import write_manifest
from lightning_rlhf.run_folders import only_looking

T = TypeVar("T")


@dataclass
class _Save:
    """What is written, what follows once that is complete, in order, and what the callback's state was before."""

    known: dict[str, Any]
    path: str | None = None
    then: list[Callable[[Any], None]] = field(default_factory=list)
    complete: bool = False
    future: Future[None] | None = None

    def follow(self, group: Any) -> None:
        self.complete = True
        for step in self.then:
            step(group)


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
        save_top_k: how many are kept, the best by ``monitor`` or the latest; -1 for all, 0 for none but ``last``.
        save_last: also keep the latest as ``last``; None does so if ``monitor`` is set.
        save_weights_only: leave out what is needed to resume.
        verbose: report each save.
        async_save: write while the run goes on, from a copy of the state in host memory. One at a time: a save waits for the
            one before. Needs `FSDPUlyssesStrategy`.
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
        async_save: bool = False,
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
            save_top_k=-1 if monitor is None and save_top_k > 1 else save_top_k,  # Lightning keeps the latest or all
            save_last=monitor is not None if save_last is None else save_last,
            save_weights_only=save_weights_only,
            verbose=verbose,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
        )
        self.save_top_k = save_top_k
        self.async_save = async_save
        self._found: str | None = None
        self._named: str | None = None
        self._noted = _Save({})
        self._failure: storage.SaveFailed | None = None
        self._ending = False

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.async_save and not _is_ours(trainer):
            raise ValueError(
                "IterationCheckpoint(async_save=True) needs FSDPUlyssesStrategy: set trainer.strategy to fsdp_ulysses, or"
                " async_save to false"
            )
        super().setup(trainer, pl_module, stage)

    def _ModelCheckpoint__warn_if_dir_not_empty(self, dirpath: Any) -> None:
        """That is what resuming looks like."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._found is not None and trainer.ckpt_path is None:  # Lightning asks again, and takes an error for a no
            raise ConnectionError(f"{self._found!r} was found and then not: the file system fails, start the run again")
        self._named = None
        if self.monitor is None and trainer.ckpt_path is not None:
            self._adopt(trainer)
        self._found, self._ending = None, False
        super().on_train_start(trainer, pl_module)
        folder = trainer.log_dir if trainer.loggers else None  # a collective: all ranks
        if trainer.is_global_zero and hasattr(pl_module, "description") and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_manifest(trainer, pl_module, [f for f in (self.dirpath, folder) if f is not None])
            if self.save_top_k and _is_local_file_protocol(str(self.dirpath)):
                warn_of_little_space(pl_module, str(self.dirpath), self.save_top_k, self.save_weights_only)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with warnings.catch_warnings():  # as it does with each new version of a logger's folder
            warnings.filterwarnings("ignore", message="The dirpath has changed from")
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
        if self.waits_for_validation or _stops_early(trainer):
            self._save(trainer)

    @property
    def waits_for_validation(self) -> bool:
        """Whether a checkpoint is due and waits for a metric that the next validation renews."""
        return self._defer_save_until_validation

    def save_now(self, trainer: pl.Trainer) -> None:
        """Save this iteration, due or not, as ``last`` if it is not among those that are kept. Collective.

        Raises:
            SaveFailed: it could not be written.
        """
        given, self.save_last = self.save_last, self.save_last or self.monitor is not None or self.save_top_k == 0
        self.on_train_end(trainer, trainer.lightning_module)
        self.save_last = given

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._settle(trainer)
        self._ending = True
        self._save(trainer)
        self._settle(trainer)
        if self._failure is not None and self._last_global_step_saved != trainer.global_step:
            raise self._failure

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        try:
            self._settle(trainer)
        except Exception as error:  # the run's own is to be seen
            rank_zero_warn(f"the checkpoint {self._noted.path!r} was not written to its end: {error}")

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

    # -- saving --

    def _save(self, trainer: pl.Trainer) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._settle(trainer)
        deferred, self._defer_save_until_validation = self._defer_save_until_validation, False
        with trainer.lightning_module.phases("checkpoint"), self._going_on(trainer):  # type: ignore[operator]
            candidates, given = self._monitor_candidates(trainer), self.save_last
            if self.monitor is None or self.monitor in candidates or deferred:
                self._save_topk_checkpoint(trainer, candidates)
            else:
                self._report_missing(trainer, candidates)
                self.save_last = given or self._ending  # otherwise nothing of this iteration would be left
            self._save_last_checkpoint(trainer, candidates)
            self.save_last = given
            self._carry_out(trainer)
        self._last_time_checked = time.monotonic()

    def _report_missing(self, trainer: pl.Trainer, candidates: dict[str, Any]) -> None:
        """Warn of a metric that is not there, unless the first validation may bring it."""
        if self._ending or not trainer.enable_validation or trainer.fit_loop.epoch_loop.val_loop._has_run:
            known = ", ".join(sorted(candidates.keys() - {"epoch", "step"})) or "those that are logged"
            rank_zero_warn(
                f"IterationCheckpoint(monitor={self.monitor!r}): no such metric was logged, so no checkpoint is ranked and at"
                f" most the latest is kept, as 'last': set monitor to one of {known}"
            )

    @contextmanager
    def _going_on(self, trainer: pl.Trainer) -> Iterator[None]:
        """If the checkpoint cannot be written, what is known of the earlier ones stays as it was."""
        names = (*self.state_dict(), "_last_global_step_saved", "_last_checkpoint_saved")
        save = self._noted = _Save({name: copy(vars(self)[name]) for name in names})
        with self._reporting(trainer, save):
            yield

    @contextmanager
    def _reporting(self, trainer: pl.Trainer, save: _Save) -> Iterator[None]:
        try:
            yield
        except storage.SaveFailed as failure:
            vars(self).update({"last_model_path": save.known["last_model_path"]} if save.complete else save.known)
            self._failure = failure
            if save.complete or not self._ending:  # otherwise it is raised
                outlook = ". The run goes on with the checkpoints it has, the next is tried when it is due"
                rank_zero_warn(f"{failure}{'' if trainer.interrupted else outlook}")

    def _carry_out(self, trainer: pl.Trainer) -> None:
        save = self._noted
        if save.path is None:
            save.follow(None)
        elif self.async_save:
            state = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
            save.future = trainer.strategy.save_in_background(state, save.path, save.follow)  # type: ignore[attr-defined]
        else:
            trainer.save_checkpoint(save.path, self.save_weights_only)
            save.follow(None)
            self._report(trainer)

    def _settle(self, trainer: pl.Trainer) -> None:
        """The checkpoint that is under way comes to its end."""
        future, self._noted.future = self._noted.future, None
        if future is None:
            return
        with trainer.lightning_module.phases("checkpoint"), self._reporting(trainer, self._noted):  # type: ignore[operator]
            future.result()
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        self._failure = None
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _save_none_monitor_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Any]) -> None:
        """The latest are kept, in `best_k_models`, whose scores are iterations."""
        kept = self.best_k_models
        surplus = list(kept)[: max(0, len(kept) + 1 - self.save_top_k)] if self.save_top_k > 0 else []
        replaced = surplus[-1] if surplus else None  # it may have the very name
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced)
        for old in (*surplus, path):
            kept.pop(old, None)
        kept[path] = monitor_candidates["step"]
        self.best_model_path = path
        self._save_checkpoint(trainer, path)
        for old in surplus:
            if old not in (path, self._named):
                self._remove_checkpoint(trainer, old)

    # what Lightning's selection calls is noted

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        save = self._noted
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath
        if save.path is None:
            save.path = filepath
        elif _is_ours(trainer):
            save.then.append(partial(_on_rank_zero, partial(storage.copy, save.path, filepath), filepath))
        else:
            save.then.append(lambda group: trainer.save_checkpoint(filepath, self.save_weights_only))

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        self._noted.then.append(partial(_on_rank_zero, partial(storage.link, filepath, linkpath), linkpath))

    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self._noted.then.append(lambda group: trainer.strategy.remove_checkpoint(filepath))

    # -- what there is --

    def _adopt(self, trainer: pl.Trainer) -> None:
        """A run that goes on from a checkpoint of its folder keeps the latest that are there, whichever attempt wrote them."""
        folder, resumed = str(self.dirpath), str(trainer.ckpt_path).removesuffix(f"/{storage.MARKER}")
        if _place(os.path.dirname(resumed)) != _place(folder):
            return
        if self._found is None:
            self._named = os.path.join(folder, os.path.basename(resumed))
        pattern = _pattern(str(self.filename))
        found = storage.on_rank_zero(lambda: sorted(storage.complete_in(folder), key=lambda entry: entry[1]))
        names = [path.rpartition("/")[2] for path, _ in found]
        own = [name for name in names if pattern.fullmatch(name) and not name.startswith(self.CHECKPOINT_NAME_LAST)]
        others = [c for c in trainer.checkpoint_callbacks if c is not self and isinstance(c, ModelCheckpoint)]
        theirs = {path for c in others for path in (*c.best_k_models, c.best_model_path, c.last_model_path)}
        paths = [path for path in (os.path.join(folder, name) for name in own) if path not in theirs]
        self.best_k_models = {path: self.best_k_models.get(path, torch.tensor(-1)) for path in paths}

    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        """Whether there is a complete checkpoint; what a process left that died is overwritten."""
        return _on_rank_zero(lambda: storage.is_complete(str(filepath)), str(filepath))

    def folder(self, trainer: pl.Trainer) -> str:
        """Where it saves, or would if it took its logger's next number now."""
        with only_looking(trainer.loggers):
            return str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        self._settle(trainer)
        latest = next(filter(None, map(latest_complete, folders_of_versions(self.folder(trainer)))), None)
        if latest is None:
            return set()
        if trainer.state.fn == TrainerFn.FITTING:
            self._found = latest
        if not _is_local_file_protocol(latest):  # Lightning asks for its time, and stores know none of folders
            marker = f"{latest}/{storage.MARKER}"
            return {marker if storage.exists(marker) else latest}
        return {latest}


_VERSION = re.compile(r"(.+)/version_\d+/([^/]+)")


def folders_of_versions(folder: str) -> Iterator[str]:
    """A folder of checkpoints, then that of each earlier run of a logger: ``folder`` is .../name/version_7/checkpoints."""
    folder = folder.rstrip("/")
    yield folder
    parts = _VERSION.fullmatch(folder)
    if parts is None:
        return
    numbers = [path.rpartition("version_")[2] for path, _ in storage.listed(parts[1])]
    for number in sorted((int(n) for n in numbers if n.isdigit()), reverse=True):
        if (other := f"{parts[1]}/version_{number}/{parts[2]}") != folder:
            yield other


def versions_of(folder: str) -> str:
    """All of `folders_of_versions`, in a line."""
    return _VERSION.sub(r"\1/version_*/\2", folder)


def latest_complete(dirpath: str) -> str | None:
    """The newest checkpoint in a local or remote folder that was written to its end, None if there is none.

    A sharded checkpoint is a folder whose metadata file is written last; one without it was interrupted.
    """
    return next(iter(storage.newest_first(dirpath)), None)


def _place(path: str) -> str:
    """The same for all ways to name a folder."""
    return os.path.realpath(path) if _is_local_file_protocol(path) else url_to_fs(path)[1].rstrip("/")


def _pattern(filename: str) -> re.Pattern[str]:
    """Names that come of a template: iterations and epochs are numbers, metrics may be anything."""
    parts = re.split(r"\{([^}:]*)[^}]*\}", filename)
    for i, part in enumerate(parts):
        parts[i] = re.escape(part) if i % 2 == 0 else r"\d+" if part in ("step", "epoch") else ".+"
    return re.compile("".join(parts) + r"(-v\d+)?(\.new)?\.ckpt")


def _is_ours(trainer: pl.Trainer) -> bool:
    return hasattr(trainer.strategy, "save_in_background")


def _on_rank_zero(function: Callable[[], T], path: str, group: Any = None) -> T:
    """What the file system does not do for a checkpoint is `SaveFailed`, on all ranks."""
    try:
        return storage.on_rank_zero(function, group)
    except OSError as error:
        raise storage.failure(error, path) from error  # type: ignore[misc]


def _stops_early(trainer: pl.Trainer) -> bool:
    return trainer.should_stop and trainer.fit_loop._can_stop_early
