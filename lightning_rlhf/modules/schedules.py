"""Learning-rate schedules over iterations, as factors of the base rate.

warm-up    (t + 1) / warmup_steps                          t < warmup_steps: the first iteration is not wasted at rate 0
constant   1
linear     1 - (1 - floor) · p                             p = progress after the warm-up, 0 … 1
cosine     floor + (1 - floor) · (1 + cos(π p)) / 2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(step: int, kind: Schedule, warmup_steps: int, total_steps: int, floor: float) -> float:
    """The factor at iteration ``step``, from 0; after ``total_steps`` it stays at ``floor``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape: dict[str, Callable[[float], float]] = {
        "constant": lambda p: 1.0,
        "linear": lambda p: floor + (1.0 - floor) * (1.0 - p),
        "cosine": lambda p: floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * p)),
    }
    return shape[kind](progress)


def warmup_schedule(
    optimizer: Optimizer, kind: Schedule, warmup_steps: int, total_steps: int, floor: float
) -> LambdaLR:
    """A scheduler for all parameter groups; step it once per iteration."""
    return LambdaLR(optimizer, lambda step: schedule_factor(step, kind, warmup_steps, total_steps, floor))
