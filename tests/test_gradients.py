"""Clipping, and what happens to gradients that are not finite: each role on its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toys import spawn

from lightning_rlhf.modules.adamw import ShardedAdamW
from lightning_rlhf.modules.gradients import clip_roles, total_norm


def groups(**gradients: list[float]) -> list[dict]:
    out = []
    for role, values in gradients.items():
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in values]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = torch.tensor([value])
        out.append({"params": parameters, "role": role})
    return out


def test_each_role_is_clipped_by_its_own_norm():
    both = groups(actor=[3.0, 4.0], critic=[0.6, 0.8])
    norms = clip_roles(both, 2.0)
    assert {role: float(norm) for role, norm in norms.items()} == pytest.approx({"actor": 5.0, "critic": 1.0})
    assert [float(p.grad) for p in both[0]["params"]] == pytest.approx([1.2, 1.6], rel=1e-5)
    assert [float(p.grad) for p in both[1]["params"]] == pytest.approx([0.6, 0.8])


def test_without_a_limit_nothing_changes():
    (actor,) = groups(actor=[30.0, 40.0])
    assert float(clip_roles([actor], None)["actor"]) == 50.0
    assert [float(p.grad) for p in actor["params"]] == [30.0, 40.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_role_without_a_finite_norm_loses_its_gradients_and_the_other_keeps_its_own(bad):
    both = groups(actor=[1.0, bad], critic=[3.0])
    norms = clip_roles(both, 10.0)
    assert norms["actor"] is None
    assert float(norms["critic"]) == 3.0
    assert [p.grad for p in both[0]["params"]] == [None, None]
    assert float(both[1]["params"][0].grad) == 3.0


def sharded(rank: int, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """What clipping and three steps make of shards (odd sizes, one of them empty on some ranks) and torch of the same."""
    names = ("shards",) if len(shape) == 1 else ("replicas", "shards")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, bias=False))
    models = [model, copy.deepcopy(model)]
    for one in models:
        fully_shard(one, mesh=mesh)
    optimizers = [
        ShardedAdamW([{"params": list(models[0].parameters()), "role": "actor"}], lr=0.1, weight_decay=0.1, fused=True),
        torch.optim.AdamW(models[1].parameters(), lr=0.1, weight_decay=0.1, fused=True),
    ]
    found = []
    for step in range(3):
        for one in models:
            one(torch.full((2, 7), 1.0 + step + rank)).square().sum().backward()
        whole = nn.Parameter(torch.zeros(2))  # beside the shards, as a layer that is not sharded has it
        whole.grad = torch.tensor([3.0, 4.0])
        beside = total_norm([*models[1].parameters(), whole], torch.device("cpu"))
        expected = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.5).full_tensor()
        norm = clip_roles(optimizers[0].param_groups, 0.5)["actor"]
        pairs = list(zip(*(one.parameters() for one in models), strict=True))
        clipped = [(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs]
        for a, b in pairs:
            a.grad = b.grad.clone()  # the optimizers are compared from equal gradients
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        states = [[v for s in o.state.values() for v in s.values() if isinstance(v, DTensor)] for o in optimizers]
        found.append(
            {
                "norms": (norm, expected),
                "beside": (beside, (expected.square() + 25.0).sqrt()),
                "clipped": clipped,
                "values": [(a.full_tensor().detach(), b.full_tensor().detach()) for a, b in pairs],
                "states": [(a.full_tensor(), b.full_tensor()) for a, b in zip(*states, strict=True)],
            }
        )
    return found


@pytest.mark.parametrize(("ranks", "shape"), [(1, (1,)), (2, (2,)), (4, (2, 2))])
def test_shards_are_clipped_and_stepped_as_torch_does_it(ranks: int, shape: tuple[int, ...]):
    every = spawn(sharded, ranks, shape)
    for steps in every:
        for step in steps:
            for name in ("norms", "beside"):
                torch.testing.assert_close(*step[name], rtol=1e-6, atol=0.0)
            assert float(step["norms"][0]) > 0.5
            for ours, torchs in step["clipped"]:
                torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=0.0)
            assert len(step["states"]) == 2 * len(step["values"])
            assert all(torch.equal(a, b) for a, b in step["values"] + step["states"])
    assert all(float(one[0]["norms"][0]) == float(every[0][0]["norms"][0]) for one in every)
