"""``manifest.json``: what a run is, beside what it writes.

    created (UTC), resumed_from, class, precision, seed_everything, roles, versions     see `lightning_rlhf.manifest`
    config       resolved, as the command line has it; null for a run out of Python
    git          commit of the working directory and whether it was changed; null outside of one
    data         number of training prompts, fingerprint of their token ids
    mesh         processes, nodes, data ranks, sequence-parallel ranks, replicas of the model; device

An earlier manifest in the folder is kept as ``manifest_1.json``, ``manifest_2.json``, ...
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from fsspec.core import url_to_fs
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rlhf.manifest import git_state

_NAME = "manifest"


def manifest(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """Of a run that is about to train."""
    strategy = module.strategy
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_from": trainer.ckpt_path and str(trainer.ckpt_path),
        **module.description,
        "config": resolved_config(trainer),
        "git": git_state(Path.cwd()),
        "data": getattr(trainer.datamodule, "fingerprint", None),  # type: ignore[attr-defined]
        "mesh": {
            "processes": strategy.world_size,
            "nodes": trainer.num_nodes,
            "data_parallel": strategy.dp_size,
            "sequence_parallel": strategy.sequence_parallel_size,
            "replicas": strategy.replicas(trainer.num_nodes),
            "device": _device(strategy.root_device),
        },
    }


def write_manifest(trainer: pl.Trainer, module: Any, folders: Iterable[str | Path]) -> None:
    """Write it into local or remote folders, on rank 0; a folder that cannot be written draws a warning."""
    text = json.dumps(manifest(trainer, module), indent=2, default=str) + "\n"
    for folder in dict.fromkeys(str(folder) for folder in folders):
        try:
            _write(folder, text)
        except Exception as error:  # of whichever file system; the run is worth more
            rank_zero_warn(f"{folder}/{_NAME}.json could not be written ({type(error).__name__}: {error})")


def _write(folder: str, text: str) -> None:
    fs, root = url_to_fs(folder)
    fs.makedirs(root, exist_ok=True)
    path = f"{root}/{_NAME}.json"
    if fs.exists(path):
        number = 1
        while fs.exists(f"{root}/{_NAME}_{number}.json"):
            number += 1
        fs.mv(path, f"{root}/{_NAME}_{number}.json")
    with fs.open(path, "w") as file:
        file.write(text)


def resolved_config(trainer: pl.Trainer) -> Any:
    """As the command line has it, plain values; None for a run out of Python, and with ``fast_dev_run``."""
    saver = next((c for c in trainer.callbacks if isinstance(c, SaveConfigCallback)), None)  # type: ignore[attr-defined]
    return None if saver is None else yaml.safe_load(saver.parser.dump(saver.config, skip_none=False))


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
