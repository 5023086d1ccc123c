"""Whether checkpoints fit where they go: a warning at the start of a run, not hours later at the first save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rlhf import storage
from lightning_rlhf.plan.memory import GIB
from lightning_rlhf.plan.run import optimizer_bytes

if TYPE_CHECKING:
    from lightning_rlhf.modules.training import TrainedModule


def checkpoint_bytes(module: TrainedModule, weights_only: bool) -> int:
    """Of all ranks together: parameters that change, and the optimizer's state of those that are trained."""
    kept = [p for n, p in module.named_parameters() if p.requires_grad or n.startswith(module.frozen_in_checkpoints)]
    trained = [p for p in module.parameters() if p.requires_grad]
    state = 0.0 if weights_only else optimizer_bytes(module.optimizer, trained[0].dtype)
    return sum(p.numel() * p.itemsize for p in kept) + int(state * sum(p.numel() for p in trained))


def warn_of_little_space(module: TrainedModule, folder: str, kept: int, weights_only: bool) -> None:
    """Warn if a local ``folder`` has no room for ``kept`` checkpoints and the one that is written before the oldest goes.

    Args:
        kept: -1 is all, of which one must fit.
    """
    place = Path(folder).absolute()
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    size, free = checkpoint_bytes(module, weights_only), shutil.disk_usage(there).free
    count = max(1, kept + 1 - sum(1 for _ in storage.complete_in(folder)))
    if size * count > free:
        rank_zero_warn(
            f"a checkpoint takes {_readable(size)} and {count} must fit into {folder!r}, where {_readable(free)} are free:"
            " free space there, lower save_top_k, set save_weights_only or change the checkpoint's dirpath"
        )


def _readable(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
