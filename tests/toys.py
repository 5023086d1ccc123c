"""What several tests need: processes over gloo, and the tiny model."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        torch.save(function(rank, *args), f"{results}/{rank}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
