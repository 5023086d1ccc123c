"""Learning rates over iterations."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.modules.schedules import warmup_schedule


def rates(kind: str, warmup: int, total: int, floor: float, iterations: int) -> list[float]:
    """Of two parameter groups, relative to their base rates, which must agree."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, 2.0)])
    scheduler = warmup_schedule(optimizer, kind, warmup, total, floor)  # type: ignore[arg-type]
    out = []
    for _ in range(iterations):
        first, second = (group["lr"] / base for group, base in zip(optimizer.param_groups, (0.5, 2.0), strict=True))
        assert first == pytest.approx(second)
        out.append(first)
        optimizer.step()
        scheduler.step()
    return out


def test_a_constant_rate_warms_up_without_an_idle_iteration():
    assert rates("constant", 4, 10, 0.3, 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_falls_to_the_floor_and_stays_there():
    assert rates("linear", 0, 4, 0.2, 6) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_after_a_warm_up():
    """Reference: warm-up 2, 8 iterations, floor 0.1; the same curve that transformers and verl have."""
    expected = [0.5, 1, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1]
    assert rates("cosine", 2, 8, 0.1, 9) == pytest.approx(expected, abs=1e-6)
