"""Clipping, and what happens to gradients that are not finite: each role on its own."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.modules.gradients import clip_roles


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
