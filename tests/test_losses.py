"""Losses against reference numbers and gradients; extremes, masks, and independence of the split."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import torch
from test_goldens import ADVANTAGES, MASK, NEW, OLD, REF, VALUES
from torch import Tensor

from lightning_rlhf.modules import losses

MODES = get_args(losses.Aggregation)
LOSSES = [losses.ppo, losses.gspo, losses.gmpo, losses.cispo, losses.sapo, losses.gpg, losses.dro]
LOSSES += [losses.dppo_tv, losses.dppo_kl, losses.clip_cov, losses.kl_cov]


def close(got: Tensor | float, want: Any, atol: float = 2e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64), atol=atol, rtol=0
    )


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


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
@pytest.mark.parametrize("loss_function", LOSSES)
@pytest.mark.parametrize("clip_dual", [3.0, None])
def test_a_log_ratio_of_100_nats_is_finite(loss_function: Any, dtype: torch.dtype, clip_dual: float | None) -> None:
    new = leaf(torch.tensor([[100.0, -100.0, 100.0, -100.0]], dtype=dtype))
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=dtype)
    mask = torch.ones_like(advantages)
    token_losses, metrics = loss_function(new, torch.zeros_like(mask), advantages, mask, clip_dual=clip_dual)
    assert token_losses.dtype == dtype
    loss = losses.aggregate(token_losses, mask, "token-mean")
    for kind in get_args(losses.KLKind):
        loss = loss + losses.aggregate(losses.kl_estimate(new, torch.zeros_like(mask), kind), mask, "token-mean")
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert all(torch.isfinite(m).all() for m in metrics.values())


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: Any) -> None:
    new, other = leaf(NEW), leaf(NEW)
    plus, plain = losses.kl_estimate(new, REF, f"{kind}+"), losses.kl_estimate(NEW, REF, kind)
    torch.testing.assert_close(plus.detach(), plain)
    plus.sum().backward()
    losses.kl_estimate(other, REF, "k2").sum().backward()
    torch.testing.assert_close(new.grad, other.grad)


@pytest.mark.parametrize("loss_function", LOSSES)
def test_on_policy_every_loss_is_the_policy_gradient(loss_function: Any) -> None:
    """Where the policy is still the old one, -A at each token; gmpo takes the mean of A over the response."""
    new, varied = leaf(OLD), ADVANTAGES * (1 + REF)
    token_losses = loss_function(new, OLD, varied, MASK, coef=0.0, lowest=9.0)[0]
    losses.aggregate(token_losses, MASK, "seq-mean-token-sum").backward()
    want = -varied * MASK / 4
    if loss_function is losses.gmpo:
        want = want.sum(1, keepdim=True) / MASK.sum(1, keepdim=True) * MASK
    close(new.grad, want, atol=1e-12)


def test_gspo_clips_whole_responses_by_their_mean_log_ratio() -> None:
    old, mask = torch.zeros(2, 4), torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    new = leaf(torch.tensor([[0.4, 0.0, 0.0, 0.0], [0.4, 0.0, 9.0, 9.0]]))  # means 0.1 and 0.2
    token_losses, metrics = losses.gspo(new, old, torch.ones(2, 4), mask, clip_low=0.15, clip_high=0.15)
    first = -torch.tensor(0.1).exp()
    close(token_losses.detach(), [[first] * 4, [-1.15, -1.15, 0, 0]], atol=1e-6)
    close(metrics["clip_fraction"], [[0.0] * 4, [1, 1, 0, 0]])
    token_losses.sum().backward()
    close(new.grad, [[first] * 4, [0.0] * 4], atol=1e-6)


def test_gmpo_bounds_the_side_that_the_advantage_pushes_to() -> None:
    old, mask, new = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[0.5, -0.5]])
    gained, metrics = losses.gmpo(new, old, torch.ones(1, 2), mask, clip_low=0.1, clip_high=0.3)
    close(gained, -torch.tensor([[-0.1, -0.1]]).exp(), atol=1e-6)  # (0.3 - 0.5) / 2
    close(metrics["clip_fraction"], [[1.0, 0.0]])
    lost, _ = losses.gmpo(new, old, -torch.ones(1, 2), mask, clip_low=0.1, clip_high=0.3)
    close(lost, torch.tensor([[0.2, 0.2]]).exp(), atol=1e-6)  # (0.5 - 0.1) / 2


def test_cispo_weighs_by_the_clipped_ratio_and_keeps_every_gradient() -> None:
    new = leaf(torch.tensor([[0.5, -0.5, 0.1]]))
    token_losses, metrics = losses.cispo(
        new, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -2.0]]), torch.ones(1, 3), clip_low=0.2, clip_high=0.3
    )
    token_losses.sum().backward()
    close(new.grad, [[-1.3, -0.8, 2 * torch.tensor(0.1).exp()]], atol=1e-6)
    close(metrics["clip_fraction"], [[1.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("old", "new", "advantage", "taught"),
    [
        (0.5, 0.55, 1.0, True),  # KL(old, new) 0.005
        (0.5, 0.8, 1.0, False),  # 0.223
        (0.5, 0.8, -1.0, True),  # back to the old policy
        (0.5, 0.2, -1.0, False),
        (0.5, 0.2, 1.0, True),
        (0.01, 0.02, 1.0, True),  # a ratio of 2, a divergence of 0.003
        (0.01, 0.02, 0.0, True),
    ],
)
def test_dppo_teaches_within_a_binary_divergence(old: float, new: float, advantage: float, taught: bool) -> None:
    now, then = (torch.tensor([[p]], dtype=torch.float64).log() for p in (new, old))
    x = leaf(now)
    divergence = old * torch.tensor(old / new).log() + (1 - old) * torch.tensor((1 - old) / (1 - new)).log()
    bound = 0.05
    assert taught == (bool(divergence <= bound) or (new > old) == (advantage < 0))
    for function, low in ((losses.dppo_kl, bound), (losses.dppo_tv, 0.2)):
        one = torch.ones_like(x)
        token_losses, metrics = function(x, then, advantage * one, one, clip_low=low, clip_high=low)
        (gradient,) = torch.autograd.grad(token_losses.sum(), x)
        close(gradient, [[-advantage * new / old * taught]], atol=1e-9)
        assert metrics["clip_fraction"].item() == (not taught)


def test_the_cap_of_dppo_bounds_the_ratio() -> None:
    new, one = leaf(torch.tensor([[-0.1]])), torch.ones(1, 1)
    losses.dppo_tv(new, torch.tensor([[-9.0]]), -one, one, cap=20.0)[0].sum().backward()
    close(new.grad, [[20.0]], atol=1e-4)


def test_clip_cov_draws_among_medium_covariances_and_drops_them() -> None:
    """Advantages ±1, log-probs ±c around their mean: covariances ±c; clipped tokens are no candidates."""
    mask = torch.ones(4, 100, dtype=torch.float64)
    size = torch.tensor([0.5, 2.0, 3.0, 9.0]).double()[:, None].expand(4, 100)
    sign = torch.where(torch.arange(100) % 2 > 0, 1.0, -1.0).double().expand(4, 100)
    new = leaf(sign * size - 10)
    old = new.detach() - 0.5 * torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None] * sign
    free, metrics = losses.clip_cov(new, old, sign, mask, share=0.05)
    chosen = free == 0
    assert chosen.sum() == 20  # of 400 tokens; the third row is clipped, the first and the last are out of bounds
    assert chosen[1].sum() == 20
    assert metrics["clip_fraction"].sum() == 20 + 100
    torch.testing.assert_close(free[~chosen], losses.ppo(new, old, sign, mask, clip_dual=None)[0][~chosen])
    others = [losses.select_clip_cov(new, old, sign, mask, share=0.05, seed=seed) for seed in (0, 1)]
    assert torch.equal(others[0], chosen)
    assert not torch.equal(others[1], chosen)
    assert losses.select_clip_cov(new, old, sign, mask, share=0.0).sum() == 1
    assert not losses.select_clip_cov(new, old, sign, mask, share=0.05, lowest=4.0, highest=5.0).any()


def test_kl_cov_holds_the_largest_covariances_back() -> None:
    new = torch.tensor([[-1.0, -3.0, -2.0, -2.0]])
    advantages, mask = torch.tensor([[1.0, -2.0, 1.0, 0.0]]), torch.ones(1, 4)
    chosen = losses.select_kl_cov(new, new, advantages, mask, share=0.25)
    assert chosen.tolist() == [[False, True, False, False]]  # covariances 1, 2, 0, 0
    old = new - 0.3
    token_losses, metrics = losses.kl_cov(new, old, advantages, mask, share=0.25, coef=2.0)
    close(token_losses, -advantages * torch.tensor(0.3).exp() + torch.tensor([[0, 0.6, 0, 0]]), atol=1e-6)
    close(metrics["ppo_kl"], [[0.3] * 4], atol=1e-6)


@pytest.mark.parametrize("kind", get_args(losses.KLKind))
def test_the_gradient_of_the_loss_form_is_the_one_that_it_claims(kind: Any) -> None:
    """Of a softmax over five tokens, by the expectation over all of them: KL(policy, reference) for k2 and every `+`,
    KL(reference, policy) for k3, nothing for k1."""
    torch.manual_seed(0)
    logits, ref = leaf(0.5 * torch.randn(5).double()), (0.5 * torch.randn(5).double()).log_softmax(0)
    log_probs = logits.log_softmax(0)
    estimate = losses.kl_estimate(log_probs[None], ref[None], kind)[0]
    (got,) = torch.autograd.grad((log_probs.detach().exp() * estimate).sum(), logits, retain_graph=True)
    reverse = (log_probs.exp() * (log_probs - ref)).sum()
    forward = (ref.exp() * (ref - log_probs)).sum()
    (reverse_gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(forward, logits)
    assert (reverse_gradient - forward_gradient).abs().max() > 0.01
    if kind == "k2" or kind.endswith("+"):
        close(got, reverse_gradient, atol=1e-12)
    elif kind == "k3":
        close(got, forward_gradient, atol=1e-12)
    elif kind == "k1":
        close(got, torch.zeros(5), atol=1e-12)


def test_value_loss_without_a_clip_is_half_the_square() -> None:
    values, returns, one = leaf(torch.tensor([[3.0, -1.0]])), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
    token_losses, metrics = losses.value_loss(values, torch.zeros(1, 2), returns, one, clip=None)
    close(token_losses.detach(), [[2.0, 2.0]])
    assert not metrics["clip_fraction"].any()
    token_losses.sum().backward()
    close(values.grad, [[2.0, -2.0]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_function", LOSSES)
def test_weights_sum_to_the_loss_over_any_split_of_the_tokens(loss_function: Any, mode: Any) -> None:
    """Rows are whole responses; what is chosen from all tokens is found before the split."""
    torch.manual_seed(0)
    mask = (torch.arange(9)[None] < torch.tensor([9, 1, 4, 7, 2, 6])[:, None]).double()
    new = leaf(torch.randn(6, 9, dtype=torch.float64) * 0.3 - 1)
    old, advantages = new.detach() + 0.2 * torch.randn(6, 9), torch.randn(6, 9).double()
    options: dict[str, Any] = {"share": 0.2, "lowest": 0.0}
    whole = losses.aggregate(loss_function(new, old, advantages, mask, **options)[0], mask, mode)
    whole.backward()
    want = new.grad.clone()
    weights = losses.token_weights(mask, mode)
    select = losses.SELECTIONS.get(loss_function)
    listed = () if select is None else inspect.signature(select).parameters
    own_options = {name: value for name, value in options.items() if name in listed}
    chosen = None if select is None else select(new, old, advantages, mask, **own_options)
    for split in ([[0, 1, 2], [3, 4, 5]], [[5], [0, 3], [4, 2, 1]], [[i] for i in range(6)]):
        new.grad = None
        total = 0.0
        for rows in split:
            own = {} if chosen is None else {"chosen": chosen[rows]}
            part = loss_function(new[rows], old[rows], advantages[rows], mask[rows], **options, **own)[0]
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
@pytest.mark.parametrize("loss_function", LOSSES)
def test_everything_masked_gives_zero_loss_and_gradient(loss_function: Any, mode: Any, junk: float) -> None:
    new, none = leaf(torch.full((2, 3), junk)), torch.zeros(2, 3)
    token_losses, _ = loss_function(new, torch.zeros(2, 3), torch.ones(2, 3), none)
    value_losses, _ = losses.value_loss(new, torch.zeros(2, 3), torch.ones(2, 3), none, clip=0.5)
    loss = losses.aggregate(token_losses, none, mode) + losses.aggregate(value_losses, none, mode)
    loss = loss + losses.aggregate(torch.full((2, 3), junk), none, mode)
    loss.backward()
    assert loss.item() == 0.0
    assert not new.grad.any()


@pytest.mark.parametrize("junk", [1e3, -1e3, float("nan")])
@pytest.mark.parametrize("loss_function", LOSSES)
def test_masked_tokens_have_no_effect(loss_function: Any, junk: float) -> None:
    returns = REF + 1

    def loss_and_gradient(fill: float) -> tuple[Tensor, Tensor]:
        new, old, adv, val, ret = (
            leaf(torch.where(MASK > 0, x, fill)) for x in (NEW, OLD, ADVANTAGES, VALUES, returns)
        )
        total = losses.aggregate(loss_function(new, old, adv.detach(), MASK)[0], MASK, "seq-mean-token-mean")
        total = total + losses.aggregate(
            losses.value_loss(val, val.detach(), ret.detach(), MASK, clip=0.2)[0], MASK, "token-mean"
        )
        total.backward()
        return total.detach(), torch.cat([new.grad, val.grad])

    for got, want in zip(loss_and_gradient(junk), loss_and_gradient(0.0), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("junk", [1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("loss_function", LOSSES)
def test_token_losses_and_metrics_are_zero_where_masked(loss_function: Any, junk: float) -> None:
    new, old, advantages, values = (torch.where(MASK > 0, x, junk) for x in (NEW, OLD, ADVANTAGES, VALUES))
    for token_losses, metrics in (
        loss_function(new, OLD, ADVANTAGES, MASK),
        loss_function(NEW, old, ADVANTAGES, MASK),
        loss_function(NEW, OLD, advantages, MASK),
        losses.value_loss(values, OLD, OLD, MASK, clip=0.2),
        losses.value_loss(OLD, OLD, values, MASK, clip=0.2),
    ):
        for x in (token_losses, *metrics.values()):
            assert not x[MASK == 0].any()


@pytest.mark.parametrize("loss_function", LOSSES)
def test_only_the_trained_side_gets_a_gradient(loss_function: Any) -> None:
    old, ref, old_values = leaf(OLD), leaf(REF), leaf(VALUES)
    new, values = leaf(NEW), leaf(VALUES + 0.1)
    token_losses, metrics = loss_function(new, old, ADVANTAGES, MASK)
    assert not any(m.requires_grad for m in metrics.values())
    total = token_losses.sum() + losses.kl_estimate(new, ref, "k3").sum()
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
