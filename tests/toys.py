"""What several tests need: processes over gloo, and short runs of the tiny model."""

from __future__ import annotations

import csv
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.loggers import CSVLogger

from lightning_rlhf import FSDPUlyssesStrategy, PromptDataModule, RLHFLightningModule, RolloutCallback, Sampling

TINY_MODULE = {"model": "random:tiny", "lr": 3e-3, "micro_batch_tokens": 4096}


def spawn(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world`` processes with a gloo group; returns what each rank returned.

    ``function`` must be importable (a module-level function). An exception in any rank is raised here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as results:
        mp.start_processes(_enter, (world, port, function, args, results), nprocs=world, start_method="spawn")
        return [torch.load(f"{results}/{rank}", weights_only=False) for rank in range(world)]


def _enter(rank: int, world: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], results: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world)
    )
    torch.set_num_threads(1)
    meeting = f"file://{results}/meeting"  # a port that was free when it was chosen may be taken by now
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        torch.save(function(rank, *args), f"{results}/{rank}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def prompts() -> list[dict[str, str]]:
    """32 prompts of three or four tokens."""
    return [{"prompt": f"say {word} "} for word in ("yes", "no", "a", "b", "one", "two", "three", "four") * 4]


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even token ids: 0.5 for a policy that draws at random."""
    return [mean(t % 2 == 0 for t in ids) for ids in completion_ids]


def fit(
    module: RLHFLightningModule,
    folder: Path,
    iterations: int,
    rollout: dict[str, Any] | None = None,
    accelerator: str = "cpu",
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    precision: str = "32-true",
    **sampling: Any,
) -> list[dict[str, float]]:
    """Train with 16 prompts an iteration and responses of 6 tokens; the metrics of each iteration."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=iterations,
        precision=precision,
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            RolloutCallback(sampling=Sampling(max_completion_length=6, **sampling), **(rollout or {})),
            *callbacks,
        ],
    )
    data = PromptDataModule(path="toys.prompts", batch_size=16, max_prompt_length=32)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
