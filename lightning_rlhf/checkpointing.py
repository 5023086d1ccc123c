"""Distributed checkpoints of a strategy: a DCP folder, local or remote; of parameters without gradient those that
change all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlhf import restricted, storage
from lightning_rlhf.background import Background

_STATES = "optimizer_states_of"
"""Key of the metadata: the parameters that each optimizer has state for."""


class DistributedCheckpoints(ModelParallelStrategy):
    """Written and read by all ranks; `background` must be there before the first one is written."""

    resumes_from: Any = None
    """The checkpoint that the run is about to load, where that is known before it is set up."""

    _background: Background | None = None
    _opened: tuple[str, dict[str, Any], Any] | None = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        followers = getattr(self.lightning_module, "frozen_in_checkpoints", ())
        kept = {n for n, p in self.model.named_parameters() if p.requires_grad or n.startswith(followers)}
        # frozen ones, and of tied ones the second name
        left_out = {n for n, _ in self.model.named_parameters(remove_duplicate=False)} - kept
        return {n: t for n, t in get_model_state_dict(self.model).items() if n not in left_out}

    def _wanted(self, stored: Container[str]) -> dict[str, Any]:
        """What is read: all of this run's parameters, but those that follow others and were not kept by the run that wrote."""
        followers = getattr(self.lightning_module, "frozen_in_checkpoints", ())
        own = self.lightning_module_state_dict().items()
        return {n: t for n, t in own if f"state_dict.{n}" in stored or not n.startswith(followers)}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Collective.

        Raises:
            SaveFailed: the file system did not take it; on all ranks, and what was at ``filepath`` is still there.
        """
        self.background.wait()
        self._write(*self._split(checkpoint), self._agreed(filepath))

    def save_in_background(
        self, checkpoint: dict[str, Any], filepath: Any, then: Callable[[dist.ProcessGroup | None], None]
    ) -> Future[None]:
        """Collective: copy the state to the host and write it while the run goes on, one checkpoint at a time.

        Args:
            checkpoint: as for `save_checkpoint`; it may change afterwards.
            filepath: of rank 0.
            then: called on all ranks, in the thread that wrote, once the checkpoint is complete. For its collectives it gets a
                process group of all ranks, None if there is one rank without groups.

        Returns:
            What ends when ``then`` has; ``result()`` raises as `save_checkpoint` does.
        """
        path = self._agreed(filepath)
        self.background.wait()
        state, content = self._split(checkpoint)
        state = self.background.copied(state)

        def job(group: dist.ProcessGroup | None) -> None:
            self._write(state, content, path, group)
            then(group)

        return self.background.start(job)

    @property
    def background(self) -> Background:
        """The thread that writes checkpoints."""
        assert self._background is not None
        return self._background

    def _agreed(self, filepath: Any) -> str:
        return self.broadcast(os.fspath(filepath))  # a str: Path("s3://b") would be a local folder

    def _split(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """What all ranks write, and the marker's content, which rank 0 does."""
        state = {"state_dict": checkpoint.pop("state_dict")}
        optimizers = checkpoint.pop("optimizer_states", [])
        state |= {f"optimizer_{i}": _plain(s) for i, s in enumerate(optimizers)}
        checkpoint[_STATES] = [sorted(s["state"]) for s in optimizers]
        return state, storage.packed(_plain(checkpoint)) if self.is_global_zero else b""

    def _write(self, state: dict[str, Any], content: bytes, path: str, group: dist.ProcessGroup | None = None) -> None:
        target = path
        try:
            target = storage.on_rank_zero(lambda: storage.prepare(path), group)
            dcp.save(state, storage_writer=storage.Writer(target), process_group=group)
            storage.on_rank_zero(lambda: storage.finish(target, path, content), group)
        except (OSError, CheckpointException) as error:
            if (failure := storage.failure(error, path)) is None:
                raise
            if self.is_global_zero:
                storage.discard(target)
            raise failure from error

    @override
    def teardown(self) -> None:
        if self._background is not None:
            self._background.close()
        super().teardown()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            storage.discard_old(os.fspath(filepath))

    def open_early(self) -> None:
        """Collective: whether `resumes_from` can be loaded, before any model is built; raises as `load_checkpoint` does."""
        self._opened = None if self.resumes_from is None else self._open(self.resumes_from, _forced())

    def _open(self, checkpoint_path: Any, trusted: bool) -> tuple[str, dict[str, Any], Any]:
        """The folder, the marker's content and the index of a checkpoint that this run can go on with."""
        path = self.broadcast(os.fspath(checkpoint_path)).removesuffix(f"/{storage.MARKER}")
        metadata, index = storage.on_rank_zero(lambda: restricted.read(path, trusted))
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training and not metadata.get(_STATES):
            raise ValueError(
                f"{path!r} holds weights alone (save_weights_only), a fit cannot go on from it: take another checkpoint, or"
                " export it and set model.model to the folder"
            )
        getattr(self.lightning_module, "check_checkpoint", lambda *_: None)(path, metadata)
        return path, metadata, index

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective.

        Args:
            checkpoint_path: the folder, or the marker in it.
            weights_only: unless False, only what a run writes is unpickled; None lets torch's own variable
                ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` decide, for Lightning passes on nothing else.

        Raises:
            FileNotFoundError: it is not there, or not complete.
            UntrustedCheckpoint: it holds pickles of other classes.
            DamagedCheckpoint: it cannot be read.
            ValueError: it is of other models, or a fit would go on from weights alone.
        """
        assert self.model is not None
        trusted = _forced() if weights_only is None else not weights_only
        early, self._opened = self._opened if checkpoint_path == self.resumes_from else None, None
        path, metadata, index = early or self._open(checkpoint_path, trusted)
        state: dict[str, Any] = {"state_dict": self._wanted(index.state_dict_metadata)}
        for i, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{i}"] = get_optimizer_state_dict(self.model, optimizer)
            # a fresh optimizer names all parameters; one that had no gradient yet (critic warm-up) has no state to load
            names = set(metadata[_STATES][i])
            own = state[f"optimizer_{i}"]
            if other := sorted(names - own["state"].keys()):
                more = f" and {len(other) - 1} more" if len(other) > 1 else ""
                raise ValueError(
                    f"{path!r} was written by a run that trained {other[0]!r}{more}, which this one does not: resume with the"
                    " model options it was written with"
                )
            own["state"] = {name: entry for name, entry in own["state"].items() if name in names}
        try:
            planner = None if trusted else restricted.Planner(path)
            dcp.load(state, storage_reader=restricted.Reader(path, index), planner=planner)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, OSError | restricted.UntrustedCheckpoint | restricted.DamagedCheckpoint):
                    raise failure from None
            reason = next((str(e) for e, _ in error.failures.values()), str(error)).splitlines()[0]
            raise ValueError(
                f"{path!r} does not fit this run ({reason}): resume with the model options it was written with"
            ) from error
        partial = StateDictOptions(strict=False)
        set_model_state_dict(self.model, state["state_dict"], options=partial)
        for i, optimizer in enumerate(self.optimizers):
            stored = state[f"optimizer_{i}"]
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=stored, options=partial)
        return metadata


def _forced() -> bool:
    """Torch's own variable, by which whatever is in a checkpoint is unpickled."""
    return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")


def _plain(value: Any) -> Any:
    """Containers and numbers as Python's own, so that the file loads without unpickling classes (``weights_only``)."""
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return (
            type(value)(_plain(v) for v in value) if type(value) in (list, tuple, set) else [_plain(v) for v in value]
        )
    for kind in (bool, int, float, str):  # restricted numbers of the command line are subclasses
        if isinstance(value, kind):
            return kind(value)
    return value
