r"""Advantage estimators: rewards of the whole iteration in, per-token advantages out.

Every estimator is a plain function of keywords, chosen by its name or by a dotted path to one of your own:

    estimator(*, rewards (B, T), mask (B, T), …only what it needs, **_) -> (advantages (B, T), returns (B, T))

    r_i = Σ_t rewards[i, t] over mask        score of a response
    g(i)                                     its group: responses to the same prompt, by id, anywhere in the batch

    gae       δ_t = r_t + γ·V_{t+1} - V_t     A_t = δ_t + γλ·A_{t+1}      returns = A + V, then A is whitened
    grpo      (r - mean_g) / (std_g + 1e-6)
    dr_grpo    r - mean_g
    rloo      (r - mean_g) · n / (n - 1)       = r - the mean of the others

Constraints. ``mask`` is 1 on sampled tokens; whatever stands elsewhere (values, rewards, NaN) changes nothing, and
both results are 0 there. A row whose mask is 0 throughout is left out of its group. Statistics are computed in
float32 or better and returned in the dtype of ``rewards``. The batch must be whole (all ranks' responses): no process
groups in here.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EPSILON = 1e-6
"""Added to a group's standard deviation, so that rewards which differ by rounding do not become advantages of ±1."""


def gae(
    *,
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    **_: Any,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation (Schulman et al., 2016) along the sampled tokens.

    A position with mask 0 (tool output, padding) is stepped over: it hands the next value and advantage on unchanged.

    Args:
        rewards: reward of each token, usually 0 except at the last one.
        values: the critic's estimate before each token.
        mask: 1 on sampled tokens.
        gamma: discount per token, γ.
        lam: weight of the longer returns, λ.
        whiten: shift and scale the advantages to mean 0 and variance 1 over all sampled tokens.

    Returns:
        Advantages, and returns A + V from before whitening: the critic's target.
    """
    on = mask > 0
    r, v = (torch.where(on, x.to(_statistics_dtype(rewards)), 0) for x in (rewards, values))
    next_value = next_advantage = r.new_zeros(r.shape[0])
    columns = []
    for t in reversed(range(r.shape[1])):
        delta = r[:, t] + gamma * next_value - v[:, t]
        next_advantage = torch.where(on[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(on[:, t], v[:, t], next_value)
        columns.append(next_advantage)
    advantages = torch.where(on, torch.stack(columns[::-1], dim=1), 0)
    returns = advantages + v
    if whiten:
        advantages = torch.where(on, masked_whiten(advantages, on), 0)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def grpo(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Group-relative advantage, (r - mean) / (std + 1e-6) (Shao et al., 2024, DeepSeekMath).

    The deviation is the unbiased one. The only member of a group has nothing to be compared with: mean 0, deviation 1.

    Args:
        rewards: reward of each token; a response's score is their sum.
        mask: 1 on sampled tokens.
        groups: equal integers for responses to the same prompt.

    Returns:
        Advantages, the same at each token of a response; and the same tensor as returns.
    """
    centred, std, _size = _centred_scores(rewards, mask, groups)
    return _per_token(centred / (std + EPSILON), rewards, mask)


def dr_grpo(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """`grpo` without the division, which favours prompts that are nearly always or never solved (Liu et al., 2025)."""
    centred, _std, _size = _centred_scores(rewards, mask, groups)
    return _per_token(centred, rewards, mask)


def rloo(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Score minus the mean of the group's other members (Ahmadian et al., 2024).

    The only member of a group has baseline 0.
    """
    centred, _std, size = _centred_scores(rewards, mask, groups)
    return _per_token(centred * size / (size - 1).clamp(min=1), rewards, mask)


def group_statistics(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Each row's score minus its group's mean, the group's unbiased deviation and its size; valid members only count.

    A group of one has mean 0 and deviation 1. Where all members are equal the difference and the deviation are
    exactly 0: means are taken of what exceeds the group's lowest score, which also keeps small differences of large
    scores.
    """
    index = torch.unique(groups, return_inverse=True)[1]
    none = scores.new_zeros(scores.shape[0])

    def total(x: Tensor) -> Tensor:
        return none.index_add(0, index, torch.where(valid, x, 0))[index]

    size = total(none + 1)
    candidates = torch.where(valid, scores, float("inf"))
    lowest = torch.full_like(scores, float("inf")).scatter_reduce(0, index, candidates, "amin")[index]
    excess = scores - lowest
    centred = excess - total(excess) / size.clamp(min=1)
    std = (total(centred.square()) / (size - 1).clamp(min=1)).sqrt()
    several = size > 1
    return torch.where(several, centred, scores), torch.where(several, std, 1), size


def masked_mean(x: Float[Tensor, "*shape"], mask: Tensor) -> Float[Tensor, ""]:
    """Mean over the positions with mask 1; 0 if there is none."""
    on = mask > 0
    return torch.where(on, x, 0).sum() / on.sum().clamp(min=1)


def masked_whiten(x: Float[Tensor, "*shape"], mask: Tensor) -> Float[Tensor, "*shape"]:
    """(x - μ) / √(σ² + 1e-8), μ and unbiased σ² over the positions with mask 1; masked positions are shifted along."""
    centred = x - masked_mean(x, mask)
    count = (mask > 0).sum()
    variance = masked_mean(centred.square(), mask) * count / (count - 1).clamp(min=1)
    return centred * (variance + 1e-8).rsqrt()


def _centred_scores(
    rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """`group_statistics` of the responses' scores."""
    on = mask > 0
    scores = torch.where(on, rewards.to(_statistics_dtype(rewards)), 0).sum(dim=1)
    return group_statistics(scores, groups, on.any(dim=1))


def _per_token(
    advantages: Float[Tensor, " B"], rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    spread = torch.where(mask > 0, advantages[:, None], 0).to(rewards.dtype)
    return spread, spread


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
