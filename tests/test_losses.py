"""Losses against reference numbers and gradients; extremes, masks, and independence of the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_rlhf.modules import losses
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.report import add_importance, finish

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "rl_math.json").read_text())
FIXTURE = {k: torch.tensor(v, dtype=torch.float64) for k, v in GOLDEN["fixture"].items()}
MASK, NEW, OLD, REF = FIXTURE["mask"], FIXTURE["new"], FIXTURE["old"], FIXTURE["ref"]
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)[:, None].expand(4, 5)
MODES = get_args(losses.Aggregation)


def close(got: Tensor | float, want: Any, atol: float = 2e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64), atol=atol, rtol=0
    )


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("want", GOLDEN["ppo"], ids=["symmetric", "clip_higher"])
def test_ppo_matches_the_reference(want: dict[str, Any]) -> None:
    new = leaf(NEW)
    token_losses, metrics = losses.ppo(
        new, OLD, ADVANTAGES, MASK, clip_low=want["clip_low"], clip_high=want["clip_high"], clip_dual=3.0
    )
    loss = losses.aggregate(token_losses, MASK, "token-mean")
    loss.backward()
    assert new.grad is not None
    close(loss.detach(), want["loss"])
    close(new.grad, want["grad"])
    close(new.grad.abs().sum(), want["grad_l1"])
    for name, value in want["metrics"].items():
        assert not metrics[name].requires_grad
        close((losses.token_weights(MASK, "token-mean") * metrics[name]).sum(), value)


def test_the_upper_clip_is_separate_from_the_lower_one() -> None:
    old, one = torch.zeros(1, 2), torch.ones(1, 2)
    new = torch.tensor([[0.4, -0.4]])  # ratios 1.49 and 0.67
    for low, high in ((0.2, 0.2), (0.2, 0.3), (0.1, 0.2)):
        got = losses.ppo(new, old, torch.tensor([[1.0, -1.0]]), one, clip_low=low, clip_high=high)[0]
        close(got, [[-(1 + high), 1 - low]], atol=1e-6)


def test_dual_clip_bounds_the_loss_at_negative_advantages() -> None:
    new, old, one = leaf(torch.tensor([[2.0, 2.0]])), torch.zeros(1, 2), torch.ones(1, 2)
    advantages = torch.tensor([[-1.0, 1.0]])
    token_losses, metrics = losses.ppo(new, old, advantages, one, clip_dual=3.0)
    close(token_losses.detach(), [[3.0, -1.2]], atol=1e-6)
    close(metrics["clip_fraction_lower"], [[1.0, 0.0]])
    token_losses.sum().backward()
    assert not new.grad.any()
    free = losses.ppo(new, old, advantages, one, clip_dual=None)[0]
    close(free[0, 0].detach(), torch.tensor(2.0).exp(), atol=1e-5)
    with pytest.raises(ValueError, match="clip_dual must be above 1"):
        losses.ppo(new, old, advantages, one, clip_dual=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("clip_dual", [3.0, None])
def test_a_log_ratio_of_100_nats_is_finite(dtype: torch.dtype, clip_dual: float | None) -> None:
    new = leaf(torch.tensor([[100.0, -100.0, 100.0, -100.0]], dtype=dtype))
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=dtype)
    mask = torch.ones_like(advantages)
    token_losses, metrics = losses.ppo(new, torch.zeros_like(mask), advantages, mask, clip_dual=clip_dual)
    assert token_losses.dtype == dtype
    loss = losses.aggregate(token_losses, mask, "token-mean")
    for kind in get_args(losses.KLKind):
        loss = loss + losses.aggregate(losses.kl_estimate(new, torch.zeros_like(mask), kind), mask, "token-mean")
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert all(torch.isfinite(m).all() for m in metrics.values())


@pytest.mark.parametrize("kind", GOLDEN["kl"])
def test_kl_estimates_match_the_reference(kind: Any) -> None:
    want, new = GOLDEN["kl"][kind], leaf(NEW)
    estimate = losses.kl_estimate(new, REF, kind)
    close(estimate[0].detach(), want["row0"])
    close(losses.aggregate(estimate, MASK, "token-mean").detach(), want["token_mean"])
    losses.aggregate(estimate, MASK, "token-sum").backward()
    assert new.grad is not None
    close(new.grad.abs().sum(), want["grad_abs_sum"])


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: Any) -> None:
    new, other = leaf(NEW), leaf(NEW)
    plus, plain = losses.kl_estimate(new, REF, f"{kind}+"), losses.kl_estimate(NEW, REF, kind)
    torch.testing.assert_close(plus.detach(), plain)
    plus.sum().backward()
    losses.kl_estimate(other, REF, "k2").sum().backward()
    torch.testing.assert_close(new.grad, other.grad)


def test_value_loss_matches_the_reference() -> None:
    values = FIXTURE["values"] + 0.5 * NEW
    returns = torch.tensor(GOLDEN["returns_discounted"], dtype=torch.float64)
    token_losses, metrics = losses.value_loss(values, FIXTURE["values"], returns, MASK, clip=0.2)
    loss, clip_fraction = GOLDEN["value_loss"]
    close(losses.aggregate(token_losses, MASK, "token-mean"), loss)
    close(losses.aggregate(metrics["clip_fraction"], MASK, "token-mean"), clip_fraction)


def test_value_loss_without_a_clip_is_half_the_square() -> None:
    values, returns, one = leaf(torch.tensor([[3.0, -1.0]])), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
    token_losses, metrics = losses.value_loss(values, torch.zeros(1, 2), returns, one, clip=None)
    close(token_losses.detach(), [[2.0, 2.0]])
    assert not metrics["clip_fraction"].any()
    token_losses.sum().backward()
    close(values.grad, [[2.0, -2.0]])


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_matches_the_reference(mode: Any) -> None:
    close(losses.aggregate(NEW, MASK, mode), GOLDEN["aggregate"][mode])


def test_norm_length_replaces_the_width_of_the_batch() -> None:
    got = losses.aggregate(NEW, MASK, "seq-mean-token-sum-norm", norm_length=1024)
    close(got, GOLDEN["aggregate"]["seq-mean-token-sum-norm_scale1024"], atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_weights_sum_to_the_loss_over_any_split_of_the_tokens(mode: Any) -> None:
    torch.manual_seed(0)
    mask = (torch.arange(9)[None] < torch.tensor([9, 1, 4, 7, 2, 6])[:, None]).double()
    new = leaf(torch.randn(6, 9, dtype=torch.float64) * 0.3 - 1)
    old, advantages = new.detach() + 0.2 * torch.randn(6, 9), torch.randn(6, 9).double()
    whole = losses.aggregate(losses.ppo(new, old, advantages, mask)[0], mask, mode)
    whole.backward()
    want = new.grad.clone()
    weights = losses.token_weights(mask, mode)
    for split in ([[0, 1, 2], [3, 4, 5]], [[5], [0, 3], [4, 2, 1]], [[i] for i in range(6)]):
        new.grad = None
        total = 0.0
        for rows in split:
            part = losses.ppo(new[rows], old[rows], advantages[rows], mask[rows])[0]
            loss = (weights[rows] * part).sum()
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(whole.item(), abs=1e-12)
        torch.testing.assert_close(new.grad, want, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_responses_does_not_matter(mode: Any) -> None:
    order = torch.tensor([2, 0, 3, 1])
    want = losses.aggregate(NEW, MASK, mode)
    torch.testing.assert_close(losses.aggregate(NEW[order], MASK[order], mode), want)


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_response_leaves_numerator_and_denominator(mode: Any) -> None:
    junk, none = torch.full((1, 5), 1e3, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64)
    got = losses.aggregate(torch.cat([NEW, junk]), torch.cat([MASK, none]), mode)
    torch.testing.assert_close(got, losses.aggregate(NEW, MASK, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("junk", [1e3, float("inf"), float("nan")])
def test_everything_masked_gives_zero_loss_and_gradient(mode: Any, junk: float) -> None:
    new, none = leaf(torch.full((2, 3), junk)), torch.zeros(2, 3)
    token_losses, _ = losses.ppo(new, torch.zeros(2, 3), torch.ones(2, 3), none)
    value_losses, _ = losses.value_loss(new, torch.zeros(2, 3), torch.ones(2, 3), none, clip=0.5)
    loss = losses.aggregate(token_losses, none, mode) + losses.aggregate(value_losses, none, mode)
    loss = loss + losses.aggregate(torch.full((2, 3), junk), none, mode)
    loss.backward()
    assert loss.item() == 0.0
    assert not new.grad.any()


@pytest.mark.parametrize("junk", [1e3, -1e3, float("nan")])
def test_masked_tokens_have_no_effect(junk: float) -> None:
    returns = torch.tensor(GOLDEN["returns_discounted"], dtype=torch.float64)

    def loss_and_gradient(fill: float) -> tuple[Tensor, Tensor]:
        new, old, adv, val, ret = (
            leaf(torch.where(MASK > 0, x, fill)) for x in (NEW, OLD, ADVANTAGES, FIXTURE["values"], returns)
        )
        total = losses.aggregate(losses.ppo(new, old, adv.detach(), MASK)[0], MASK, "seq-mean-token-mean")
        total = total + losses.aggregate(
            losses.value_loss(val, val.detach(), ret.detach(), MASK, clip=0.2)[0], MASK, "token-mean"
        )
        total.backward()
        return total.detach(), torch.cat([new.grad, val.grad])

    for got, want in zip(loss_and_gradient(junk), loss_and_gradient(0.0), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("junk", [1e3, float("inf"), float("nan")])
def test_token_losses_and_metrics_are_zero_where_masked(junk: float) -> None:
    new, old, advantages, values = (torch.where(MASK > 0, x, junk) for x in (NEW, OLD, ADVANTAGES, FIXTURE["values"]))
    for token_losses, metrics in (
        losses.ppo(new, OLD, ADVANTAGES, MASK),
        losses.ppo(NEW, old, ADVANTAGES, MASK),
        losses.ppo(NEW, OLD, advantages, MASK),
        losses.value_loss(values, OLD, OLD, MASK, clip=0.2),
        losses.value_loss(OLD, OLD, values, MASK, clip=0.2),
    ):
        for x in (token_losses, *metrics.values()):
            assert not x[MASK == 0].any()


def test_only_the_trained_side_gets_a_gradient() -> None:
    old, ref, old_values = leaf(OLD), leaf(REF), leaf(FIXTURE["values"])
    new, values = leaf(NEW), leaf(FIXTURE["values"] + 0.1)
    total = losses.ppo(new, old, ADVANTAGES, MASK)[0].sum() + losses.kl_estimate(new, ref, "k3").sum()
    total = total + losses.value_loss(values, old_values, OLD, MASK, clip=0.2)[0].sum()
    total.backward()
    assert old.grad is None
    assert ref.grad is None
    assert old_values.grad is None
    assert new.grad.any()
    assert values.grad.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.bfloat16, torch.float64])
def test_masks_of_every_type_weigh_alike(dtype: torch.dtype) -> None:
    mask = torch.zeros(3, 1000, dtype=dtype)
    mask[0], mask[1, :3] = 1, 1
    weights = losses.token_weights(mask, "token-mean")
    assert weights.dtype in (torch.float32, torch.float64)
    close(weights.sum(), 1.0, atol=1e-5)
    close(weights[1, 0], 1 / 1003, atol=1e-9)


def test_unknown_names_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"must be one of k1, abs, .*got 'kl'"):
        losses.kl_estimate(NEW, REF, "kl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be one of token-mean, .*got 'mean'"):
        losses.token_weights(MASK, "mean")  # type: ignore[arg-type]


# -- rollout correction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("want", GOLDEN["importance"], ids=lambda want: f"{want['level']}-{want['floor']}")
def test_importance_weights_match_the_reference(want: dict[str, Any]) -> None:
    correction = losses.Correction(want["level"], want["cap"], want["floor"])
    weights = losses.importance_weights(leaf(OLD), FIXTURE["rollout"], MASK, correction)
    assert not weights.requires_grad
    close(weights, want["weights"])
    metrics = Metrics()
    add_importance(metrics, weights, losses.token_weights(MASK, "token-mean"), want["cap"])
    reduced = finish(metrics.reduce())
    close(reduced["rollout/is_weight"], want["mean"])
    close(reduced["rollout/is_ess"], want["ess"])
    capped = (weights == 0) | (weights >= want["cap"])
    close(reduced["rollout/is_capped_ratio"], (capped * MASK).sum() / MASK.sum())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_unknown_log_prob_weighs_one_and_padding_nothing(level: Any) -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0, 7.0], [-1.0, -1.0, float("nan"), float("nan")]])
    sampler = torch.tensor([[float("nan"), -1.5, float("-inf"), float("nan")], [-1.0, -1.0, -1.0, 50.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    got = losses.importance_weights(old, sampler, mask, losses.Correction(level))
    ratio = torch.tensor(0.5).exp()
    first = [1.0, ratio, 1.0, 0.0] if level == "token" else [ratio, ratio, ratio, 0.0]
    close(got, [first, [1.0, 1.0, 1.0, 0.0]], atol=1e-6)
    huge = losses.importance_weights(old + 1e3, old, mask[:1], losses.Correction(level, cap=5.0))[0]
    close(huge, [5.0, 5.0, 5.0, 0.0])


def test_bounds_of_importance_weights_are_checked() -> None:
    with pytest.raises(ValueError, match=r"model\.correction\.floor must be below cap=2, got 3"):
        losses.Correction(floor=3.0)
