"""Metrics: means weigh what they should, one reduction per kind, the same numbers on every rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toys import spawn

from lightning_rlhf.modules.metrics import Metrics


def test_means_are_weighted_and_sums_and_maxima_add_up() -> None:
    metrics = Metrics()
    metrics.mean("loss", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.0], [0.25, 0.25]]))
    metrics.mean("loss", 10.0, 1.0)
    metrics.mean("plain", torch.tensor([1.0, 2.0, 6.0]))
    metrics.sum("skipped", 1)
    metrics.sum("skipped", torch.tensor([True, True, False]))
    metrics.max("length", torch.tensor([3, 9]))
    metrics.max("length", 4)
    got = metrics.reduce()
    assert got == {"loss": (0.5 + 0.75 + 1.0 + 10.0) / 2.0, "plain": 3.0, "skipped": 3.0, "length": 9.0}
    assert all(isinstance(v, float) for v in got.values())


def test_values_without_weight_may_be_anything_and_a_mean_without_weight_is_left_out() -> None:
    metrics = Metrics()
    metrics.mean("a", torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([2.0, 0.0, 0.0]))
    metrics.mean("none", torch.tensor([1.0, 2.0]), torch.zeros(2))
    metrics.mean("empty", torch.zeros(0))
    assert metrics.reduce() == {"a": 1.0}
    assert Metrics().reduce() == {}


def test_a_nan_that_counts_stays_visible() -> None:
    metrics = Metrics()
    metrics.mean("norm", torch.tensor([1.0, float("nan")]))
    metrics.max("worst", float("nan"))
    metrics.max("worst", 1.0)
    metrics.max("none", torch.zeros(0))
    got = metrics.reduce()
    assert math.isnan(got["norm"])
    assert math.isnan(got["worst"])
    assert got["none"] == float("-inf")


def test_totals_are_kept_in_double_precision() -> None:
    metrics = Metrics()
    for value in (2**24, 1):  # float32 would lose the 1
        metrics.sum("tokens", value)
        metrics.mean("weighted", 1.0, value)
        metrics.mean("x", torch.tensor(value))
    assert metrics.reduce() == {"tokens": 2**24 + 1, "weighted": 1.0, "x": (2**24 + 1) / 2}


def test_the_graph_is_not_kept() -> None:
    metrics = Metrics()
    metrics.mean("x", torch.ones(2, requires_grad=True) * 2)
    assert not metrics._means["x"].requires_grad


def test_one_reduction_per_kind_in_sorted_order() -> None:
    calls: list[tuple[str, int]] = []

    def all_reduce(vector: Tensor, how: str) -> Tensor:
        calls.append((how, vector.numel()))
        return vector * 2 if how == "sum" else vector

    metrics = Metrics()
    for name in ("b", "a", "c"):
        metrics.mean(name, ord(name), 1)
    metrics.sum("total", 5)
    metrics.max("top", 7)
    want = {"a": 97.0, "b": 98.0, "c": 99.0, "total": 10.0, "top": 7.0}
    assert metrics.reduce(all_reduce) == want
    assert calls == [("sum", 7), ("max", 1)]


def test_one_name_is_one_kind() -> None:
    metrics = Metrics()
    metrics.mean("x", 1.0)
    metrics.max("x", 1.0)
    with pytest.raises(ValueError, match="not two of them: x"):
        metrics.reduce()


def two_ranks(rank: int) -> dict[str, float]:
    def all_reduce(vector: Tensor, how: str) -> Tensor:
        dist.all_reduce(vector, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
        return vector

    metrics = Metrics()
    names = ["loss", "kl"] if rank == 0 else ["kl", "loss"]
    for name in names:  # rank 0 has 3 tokens, rank 1 has 1: the mean is over tokens, not over ranks
        value = 1.0 if name == "loss" else 5.0
        metrics.mean(name, torch.full((3 - 2 * rank,), value + rank), torch.full((3 - 2 * rank,), 0.25))
    metrics.mean("only_on_1", 8.0, float(rank))
    metrics.sum("failures", rank + 1)
    metrics.max("length", torch.tensor([10 - rank]))
    return metrics.reduce(all_reduce)


def test_two_ranks_get_the_same_token_weighted_numbers() -> None:
    first, second = spawn(two_ranks, 2)
    assert first == second
    assert first == {"loss": 1.25, "kl": 5.25, "only_on_1": 8.0, "failures": 3.0, "length": 10.0}
