"""One job at a time beside the run, on a copy of its state: how `FSDPUlyssesStrategy` writes while the run goes on.

    run          state ── copy ──▶ host memory   next rollout, next update, which change the state in place
    thread                          └─ job: write, then what follows

Host buffers (pinned on CUDA) are allocated once and reused. The thread's collectives have a process group of their own, so they
never interleave with those of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.host_memory import HostBlocks, local_of

Job = Callable[[dist.ProcessGroup | None], None]


class Background:
    """A thread that each rank has.

    Args:
        device: of the state.
        timeout: of the thread's collectives.
    """

    def __init__(self, device: torch.device, timeout: timedelta | None) -> None:
        self._device, self._timeout = device, timeout
        self._buffers: dict[str, Tensor] = {}
        self._blocks = HostBlocks()
        self._group: dist.ProcessGroup | None = None
        self._job: Future[None] | None = None

    def copied(self, state: Any) -> Any:
        """The same containers with every tensor in host memory that is overwritten by the next call."""
        self._blocks.expect(_nbytes(state) - _nbytes(self._buffers))
        copy = self._copied("", state)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copy

    def start(self, job: Job) -> Future[None]:
        """Collective: run ``job(group)`` in the thread, once the job before has ended; ``group`` has all ranks."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self.wait()
        future: Future[None] = Future()
        self._job = future
        Thread(target=self._run, args=(job, future), name="checkpoint", daemon=True).start()
        return future

    def wait(self) -> None:
        """For the end of the job, however it ended."""
        if self._job is not None:
            wait([self._job])

    def close(self) -> None:
        """Wait and let go of the host memory, which torch keeps for others if it is pinned."""
        self.wait()
        self._buffers.clear()
        self._blocks = HostBlocks()

    def _run(self, job: Job, future: Future[None]) -> None:
        if self._device.type == "cuda":  # a new thread is on the first one, and would claim memory there
            torch.cuda.set_device(self._device)
        try:
            job(self._group)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _copied(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._on_host(name, value.detach())
        if isinstance(value, dict):
            return {key: self._copied(f"{name}/{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(f"{name}/{i}", item) for i, item in enumerate(value))
        return value

    def _on_host(self, name: str, tensor: Tensor) -> Tensor:
        local = local_of(tensor)
        if type(local) is not Tensor:  # of another package's class, of which nothing is known
            return tensor.to("cpu", copy=True)
        host = self._buffers.get(name)
        if host is None or local_of(host).shape != local.shape or host.dtype != tensor.dtype:
            host = self._buffers[name] = self._blocks.empty_like(tensor, local.is_cuda)
        local_of(host).copy_(local, non_blocking=True)
        return host


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return local_of(value).nbytes
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_nbytes, items))
