"""Predicted against measured peak memory of one configuration, phase by phase, on this machine's GPUs.

python benchmarks/memory.py --config benchmarks/grpo_step.yaml [--any.option=...]

Runs three iterations and prints, per phase, GiB that the plan predicts beside what the first rank saw: the peak of torch's
allocator while the engine sleeps, the device's memory in use during the rollout (an engine's pool is not torch's). Where
something is parked in host memory there is a row for it: pinned memory of the first rank, without the engine's own.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlhf.callbacks.memory import Memory
from lightning_rlhf.callbacks.planning import device_memory, plan_of
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.cli import RLHFCLI
from lightning_rlhf.plan.memory import GIB

MEASURED = {"rollout": "memory_device_gb/generate", "log_prob": "memory_gb/log_prob", "update": "memory_gb/update"}


class Compare(pl.Callback):
    """Keeps the largest value of each phase and prints the table at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.pinned_before = 0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.pinned_before = torch.cuda.host_memory_stats()["allocated_bytes.current"]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        for name, key in MEASURED.items():
            if key in trainer.callback_metrics:
                self.seen[name] = max(self.seen.get(name, 0.0), float(trainer.callback_metrics[key]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        rollout = next(c for c in trainer.callbacks if isinstance(c, RolloutCallback))
        plan = plan_of(trainer, pl_module, rollout, device_memory(pl_module.device))
        print(f"{'GiB':10} predicted  measured  predicted/measured")
        for phase in plan.phases:
            if phase.name in self.seen:
                outside = 0 if phase.name == "rollout" else phase.parts["context"]  # not in torch's allocator
                predicted, measured = (phase.total - outside) / GIB, self.seen[phase.name]
                print(f"{phase.name:10} {predicted:9.2f} {measured:9.2f}  {predicted / measured:8.3f}")
        if parked := sum(plan.host.values()):
            predicted = parked / GIB / (trainer.world_size // trainer.num_nodes)
            measured = (torch.cuda.host_memory_stats()["allocated_bytes.peak"] - self.pinned_before) / GIB
            print(f"{'host':10} {predicted:9.2f} {measured:9.2f}  {predicted / measured:8.3f}")


class CompareCLI(RLHFCLI):
    """The command line with the comparison and the memory observer added."""

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if not any(isinstance(callback, Memory) for callback in trainer.callbacks):
            trainer.callbacks.append(Memory())
        trainer.callbacks.append(Compare())
        return trainer


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("benchmarks/memory.py measures GPU memory: there is no CUDA device")
    CompareCLI(["fit", *sys.argv[1:], "--trainer.max_steps=3"])
