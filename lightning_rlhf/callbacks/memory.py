"""Memory of this process, once per iteration, in GiB (2^30 bytes).

    perf/memory_allocated_gb   peak of tensors in torch's allocator during the iteration (CUDA)
    perf/memory_reserved_gb    peak of what the allocator held
    memory_gb/<phase>          peak of allocated tensors inside each phase, 0 if it was skipped
    memory_device_gb/<phase>   memory of the device in use when the phase ended, by any allocator or process
    perf/cpu_memory_gb         resident memory of the process on the host

An engine that sleeps keeps its addresses, and torch counts them: what has no memory is taken off. An observer: it resets the
allocator's peak counters at the edges of phases, which changes no result.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.plan.memory import GIB
from lightning_rlhf.rollout.engine import RolloutEngine, Unmapped


class Memory(pl.Callback):
    """Logs peaks per phase and per iteration."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._phases: dict[str, int] = {}
        self._device: dict[str, int] = {}
        self._allocated = 0
        self._reserved = 0
        self._engine: RolloutEngine | None = None
        self._unmapped = Unmapped()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.device.type != "cuda":
            return
        pl_module.phases.on_start.append(self._enter)
        pl_module.phases.on_end.append(self._leave)
        self._open.clear()
        self._clear()
        self._engine = next((c.engine for c in trainer.callbacks if isinstance(c, RolloutCallback)), None)  # type: ignore[attr-defined]
        self._least_unmapped()
        torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for listeners, own in ((pl_module.phases.on_start, self._enter), (pl_module.phases.on_end, self._leave)):
            if own in listeners:
                listeners.remove(own)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            self._fold()
            self._clear()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = {"perf/cpu_memory_gb": resident_bytes() / GIB}
        if pl_module.device.type == "cuda":
            self._fold()
            metrics["perf/memory_allocated_gb"] = self._allocated / GIB
            metrics["perf/memory_reserved_gb"] = self._reserved / GIB
            metrics |= {f"memory_gb/{name}": peak / GIB for name, peak in self._phases.items()}
            metrics |= {f"memory_device_gb/{name}": used / GIB for name, used in self._device.items()}
            self._clear()
        pl_module.log_dict(metrics, sync_dist=False, batch_size=1)

    def _enter(self, name: str) -> None:
        self._fold()
        self._open.append(name)

    def _leave(self, name: str) -> None:
        self._fold()
        if name in self._open:
            self._open.remove(name)
            free, total = torch.cuda.mem_get_info()
            self._device[name] = total - free

    def _fold(self) -> None:
        """Credit the peak since the last edge to the iteration and to all open phases, and start a new one."""
        unmapped = self._least_unmapped()
        peak = torch.cuda.max_memory_allocated() - unmapped.allocated
        for name in self._open:
            self._phases[name] = max(self._phases.get(name, 0), peak)
        self._allocated = max(self._allocated, peak)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved() - unmapped.reserved)
        torch.cuda.reset_peak_memory_stats()

    def _least_unmapped(self) -> Unmapped:
        """Since the last edge: an engine falls asleep and wakes between two, it does not do both."""
        before, self._unmapped = self._unmapped, Unmapped() if self._engine is None else self._engine.unmapped
        return Unmapped(*map(min, before, self._unmapped))

    def _clear(self) -> None:
        self._phases, self._device = dict.fromkeys(self._phases, 0), dict.fromkeys(self._device, 0)
        self._allocated = self._reserved = 0


def resident_bytes() -> int:
    """Physical memory that this process holds; where /proc is missing, its peak so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
