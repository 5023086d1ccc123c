"""Rollout correction: unknown log-probs, bounds, rejection, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_goldens import MASK, OLD, SAMPLER, close

from lightning_rlhf.modules.correction import Correction, importance_weights, kept, mean_weight, off_policy


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_unknown_log_prob_weighs_one_and_padding_nothing(level: Any) -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0, 7.0], [-1.0, -1.0, float("nan"), float("nan")]])
    sampler = torch.tensor([[float("nan"), -1.5, float("-inf"), float("nan")], [-1.0, -1.0, -1.0, 50.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    got = importance_weights(old, sampler, mask, Correction(level))
    ratio = torch.tensor(0.5).exp()
    first = [1.0, ratio, 1.0, 0.0] if level == "token" else [ratio, ratio, ratio, 0.0]
    close(got, [first, [1.0, 1.0, 1.0, 0.0]], atol=1e-6)
    huge = importance_weights(old + 1e3, old, mask[:1], Correction(level, cap=5.0))[0]
    close(huge, [5.0, 5.0, 5.0, 0.0])


def test_bounds_of_importance_weights_are_checked() -> None:
    with pytest.raises(ValueError, match=r"model\.correction\.floor must be below cap=2, got 3"):
        Correction(floor=3.0)


def test_weights_have_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not importance_weights(old, SAMPLER, MASK, Correction()).requires_grad
    assert not kept(old, SAMPLER, MASK, Correction(reject={"token_k2": 0.1})).requires_grad


def test_a_geometric_mean_does_not_depend_on_the_length() -> None:
    """A constant difference of 0.02 nats a token: the product over 1,000 tokens is e^20, the mean e^0.02."""
    old, mask = torch.full((1, 1000), -1.0), torch.ones(1, 1000)
    for level, want in (("geometric", 0.02), ("sequence", 20.0), ("token", 0.02)):
        weights = importance_weights(old, old - 0.02, mask, Correction(level, cap=1e12))  # type: ignore[arg-type]
        torch.testing.assert_close(weights.log(), torch.full_like(old, want), rtol=1e-4, atol=1e-4)


def test_without_a_level_only_rejection_is_left() -> None:
    weights = importance_weights(OLD, SAMPLER, MASK, Correction(None, reject={"token_k2": 0.004}))
    close(weights, MASK)
    with pytest.raises(ValueError, match=r"model\.correction\.level null needs reject"):
        Correction(None)


def test_every_measure_that_is_given_must_hold() -> None:
    token, response = {"token_k2": 0.004}, {"seq_mean_k3": 0.002}
    both = kept(OLD, SAMPLER, MASK, Correction(reject=token | response))
    apart = [kept(OLD, SAMPLER, MASK, Correction(reject=one)) for one in (token, response)]
    close(both, apart[0] * apart[1])
    assert 0 < both.sum() < min(x.sum() for x in apart)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_largest_token_rejects_its_response(kind: str) -> None:
    """Largest |x| by response: 0.1, 0.05, 0.1, 0.1; k2 of them 0.005 and 0.00125."""
    got = kept(OLD, SAMPLER, MASK, Correction(reject={f"seq_max_{kind}": 0.003}))
    close(got, MASK * torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None])


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_an_unknown_log_prob_rejects_nothing_and_is_left_out_of_the_mismatch(junk: float) -> None:
    sampler = SAMPLER.clone()
    sampler[0, 0] = junk
    assert kept(OLD, sampler, MASK, Correction(reject={"token_k2": 0.004}))[0, 0] == 1
    clean = off_policy(OLD, torch.where(MASK > 0, SAMPLER, junk), MASK)
    for name, (values, weights) in off_policy(OLD, sampler, MASK).items():
        assert values.isfinite().all(), name
        if values.dim() == 2:
            assert weights.sum() == MASK.sum() - 1
        assert clean[name][0].isfinite().all()


def test_an_empty_batch_has_mean_weight_one() -> None:
    none = torch.zeros_like(MASK)
    for level in ("token", "sequence"):
        correction = Correction(level, normalize=True)  # type: ignore[arg-type]
        assert mean_weight(importance_weights(OLD, SAMPLER, none, correction), none, correction) == 1.0


@pytest.mark.parametrize(
    ("reject", "message"),
    [
        ({"token_k9": 1.0}, "'token_k9' is none of token_k1"),
        ({"seq_max_k1": [0.5, 2.0]}, "'seq_max_k1' is none of"),
        ({"token_k1": 1.0}, "token_k1 needs a list of two positive bounds, got 1.0"),
        ({"seq_mean_k3": [0.1, 0.2]}, r"seq_mean_k3 needs one upper bound, got \[0.1, 0.2\]"),
        ({"token_k1": [2.0, 0.5]}, "the lower one first"),
        ({"token_k1": [0.0, 0.5]}, "two positive bounds"),
    ],
)
def test_bounds_of_rejection_are_checked(reject: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(reject=reject)


@pytest.mark.parametrize("bounds", [{}, {"cap": 0.5}, {"floor": 1.2}])
def test_a_token_that_either_side_does_not_know_weighs_1_whatever_the_bounds(bounds):
    old = torch.tensor([[-1.0, -2.0, math.nan, -1.0, -1.0]])
    sampler = torch.tensor([[math.nan, math.inf, -3.0, -math.inf, math.nan]])
    weights = importance_weights(old, sampler, torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]]), Correction(**bounds))
    assert weights.tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0]]
