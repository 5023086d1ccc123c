r"""Advantage estimators: rewards of the whole iteration in, per-token advantages out.

Every estimator is a plain function of keywords, chosen by its name or by a dotted path to one of your own:

    estimator(*, rewards (B, T), mask (B, T), …only what it needs, **_) -> (advantages (B, T), returns (B, T))

    r_i = Σ_t rewards[i, t] over mask        score of a response, l_i its sampled tokens
    R_t = r_t + γ·R_{t+1}                    reward to go
    g(i)                                     its group: responses to the same prompt, by id, anywhere in the batch

    gae        δ_t = r_t + γ·V_{t+1} - V_t   A_t = δ_t + γλ·A_{t+1}      returns = A + V, then A is whitened
    grpo       (r - mean_g) / (std_g + 1e-6), or with the std of the batch
    dr_grpo     r - mean_g
    rloo       (r - mean_g) · n / (n - 1)     = r - the mean of the others
    opo         r - Σ_g l·r / Σ_g l
    gpg        (r - mean_g) · B / #(r ≠ 0)
    gdpo       z / std(z) over the batch, z = Σ_k w_k·(r_k - mean_g r_k) / (std_g r_k + 1e-6) over reward functions k
    grpo_passk (r - second_g) / (std_g + 1e-6) for the best of the group, 0 for the others
    remax       R_t - score of the greedy response
    reinforce_plus_plus            whiten(R_t)
    reinforce_plus_plus_baseline   whiten(r - mean_g)
    optimal_token_baseline         R_t - Σ_g R_t·W_t / Σ_g W_t      W_t = Σ_{s ≤ t} (1 - 2π_s + Σ_v π_s(v)²)

Constraints. ``mask`` is 1 on sampled tokens; whatever stands elsewhere (values, rewards, NaN) changes nothing, and
both results are 0 there. A row whose mask is 0 throughout is left out of its group. Statistics are computed in
float32 or better and returned in the dtype of ``rewards``. The batch must be whole (all ranks' responses): no process
groups in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from jsonargparse.typing import ClosedUnitInterval
from torch import Tensor

from lightning_rlhf.modules.numbers import PositiveFloat

EPSILON = 1e-6
"""Added to a group's standard deviation, so that rewards which differ by rounding do not become advantages of ±1."""

NOTHING_ALONE = ("grpo_passk", "gdpo")
"""Estimators that give the only response of a group 0; of the others it has what a score without a baseline is worth."""


def gae(
    *,
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    gamma: ClosedUnitInterval = 1.0,
    lam: ClosedUnitInterval = 1.0,
    lam_critic: ClosedUnitInterval | None = None,
    length_alpha: PositiveFloat | None = None,
    whiten: bool = True,
    **_: Any,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) along the sampled tokens.

    A position with mask 0 (tool output, padding) is stepped over: it hands the next value and advantage on unchanged.

    Args:
        rewards: reward of each token, usually 0 except at the last one.
        values: the critic's estimate before each token.
        mask: 1 on sampled tokens.
        gamma: discount per token, γ.
        lam: weight of the longer returns, λ.
        lam_critic: λ of the returns, i.e. of the critic's target; None is ``lam``. VAPO takes 1 (Yue et al. 2025,
            arXiv:2504.05118).
        length_alpha: α of VAPO's λ = 1 - 1 / (α·l) for a response of l sampled tokens, which then stands for ``lam``.
        whiten: shift and scale the advantages to mean 0 and variance 1 over all sampled tokens.

    Returns:
        Advantages, and returns A + V from before whitening: the critic's target.
    """
    on = mask > 0
    r, v = (torch.where(on, x.to(_statistics_dtype(rewards)), 0) for x in (rewards, values))
    weight: float | Tensor = lam
    if length_alpha is not None:
        weight = (1 - 1 / (length_alpha * on.sum(1).to(r.dtype))).clamp(0, 1)
    advantages = _backward(r, v, on, gamma, weight)
    returns = v + (advantages if lam_critic is None else _backward(r, v, on, gamma, lam_critic))
    if whiten:
        advantages = torch.where(on, masked_whiten(advantages, on), 0)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def grpo(
    *,
    rewards: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    groups: Int[Tensor, " B"],
    std: Literal["group", "batch"] = "group",
    **_: Any,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Group-relative advantage, (r - mean) / (std + 1e-6) (Shao et al. 2024, arXiv:2402.03300).

    The deviation is the unbiased one. The only member of a group has nothing to be compared with: mean 0, deviation 1.

    Args:
        rewards: reward of each token; a response's score is their sum.
        mask: 1 on sampled tokens.
        groups: equal integers for responses to the same prompt.
        std: whose deviation: of the group's scores, or of all scores of the batch (Liu et al. 2025, arXiv:2508.08221).

    Returns:
        Advantages, the same at each token of a response; and the same tensor as returns.
    """
    scores, valid = _scores(rewards, mask)
    centred, deviation, _size = group_statistics(scores, groups, valid)
    if std == "batch":
        deviation = group_statistics(scores, torch.zeros_like(groups), valid)[1]
    return _per_token(centred / (deviation + EPSILON), rewards, mask)


def dr_grpo(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """`grpo` without the division, which favours prompts that are nearly always or never solved (Liu et al. 2025,
    arXiv:2503.20783).
    """
    centred, _std, _size = _centred_scores(rewards, mask, groups)
    return _per_token(centred, rewards, mask)


def rloo(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Score minus the mean of the group's other members (Ahmadian et al. 2024, arXiv:2402.14740).

    The only member of a group has baseline 0.
    """
    centred, _std, size = _centred_scores(rewards, mask, groups)
    return _per_token(centred * size / (size - 1).clamp(min=1), rewards, mask)


def opo(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Score minus the group's mean weighted by length, r - Σ_g l·r / Σ_g l (Hao et al. 2025, arXiv:2505.23585).

    The baseline of least variance where the gradients of tokens are of equal size and independent. The only member of a
    group has baseline 0.
    """
    scores, valid = _scores(rewards, mask)
    total, lengths = _total_of(groups), (mask > 0).sum(1).to(scores.dtype)
    excess = torch.where(valid, scores + _highest(-scores, groups, valid), 0)
    centred = excess - total(lengths * excess) / total(lengths).clamp(min=1)
    return _per_token(torch.where(total(valid.to(scores.dtype)) > 1, centred, scores), rewards, mask)


def gpg(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """(r - mean) · B / #(r ≠ 0) over the whole batch of B responses (Chu et al. 2025, arXiv:2504.02546); ``loss: gpg``.

    The factor makes up for responses without a reward, from which nothing is learned.
    """
    scores, valid = _scores(rewards, mask)
    scale = valid.sum() / (scores != 0).sum().clamp(min=1)
    return _per_token(group_statistics(scores, groups, valid)[0] * scale, rewards, mask)


def grpo_passk(
    *,
    rewards: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    groups: Int[Tensor, " B"],
    scale: bool = True,
    **_: Any,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """The best response of a group by its lead over the second, (r - second) / (std + 1e-6); the others 0.

    One of the unbiased gradients of pass@k and max@k (Tang et al. 2025, arXiv:2503.19595). Nothing is learned from a tie
    for the best, nor from a group of one.

    Args:
        rewards: reward of each token; a response's score is their sum.
        mask: 1 on sampled tokens.
        groups: equal integers for responses to the same prompt.
        scale: divide by the group's deviation.
    """
    scores, valid = _scores(rewards, mask)
    _centred, std, size = group_statistics(scores, groups, valid)
    best = valid & (scores == _highest(scores, groups, valid))
    alone = _total_of(groups)(best.to(scores.dtype)) == 1
    rival = _highest(scores, groups, valid & ~best)
    lead = torch.where(best & alone & (size > 1), scores - rival, 0)
    return _per_token(lead / (std + EPSILON) if scale else lead, rewards, mask)


def gdpo(
    *,
    rewards: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    groups: Int[Tensor, " B"],
    parts: Float[Tensor, "B K"] | None,
    part_weights: Sequence[float],
    **_: Any,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """`grpo` of each reward function on its own, their weighted sum, scaled to deviation 1 over the batch (Liu et al. 2026,
    arXiv:2601.05242). TRL calls it normalize_then_sum.

    In a sum that is normalised once, functions of different spread drown each other, and different combinations of rewards
    become the same advantage. The mean over the batch is 0 by itself. A function that abstains on a response adds nothing there
    and has its mean and deviation without it; one that has a single opinion in a group adds nothing.

    Args:
        rewards: not used but for their dtype.
        mask: 1 on sampled tokens.
        groups: equal integers for responses to the same prompt.
        parts: what each of K functions gave, NaN where it abstained.
        part_weights: of the functions.

    Raises:
        ValueError: there are no parts: the rewards come from a ``score`` of one's own that has none.
    """
    if parts is None or parts.shape[1] != len(part_weights):
        raise ValueError(
            "model.advantage gdpo needs reward functions with their weights, a score() of your own has none"
        )
    valid = (mask > 0).any(dim=1)
    total = torch.zeros(len(parts), dtype=_statistics_dtype(rewards), device=parts.device)
    for part, weight in zip(parts.to(total.dtype).unbind(1), part_weights, strict=True):
        given = valid & part.isfinite()
        centred, std, size = group_statistics(part.nan_to_num(), groups, given)
        total += weight * torch.where(given & (size > 1), centred / (std + EPSILON), 0)
    spread = (total.square().sum() / (valid.sum() - 1).clamp(min=1)).sqrt()
    return _per_token(total / (spread + EPSILON), rewards, mask)


def reinforce_plus_plus(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], gamma: ClosedUnitInterval = 1.0, **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Discounted rewards to go, whitened over the whole batch (Hu et al. 2025, arXiv:2501.03262).

    With ``kl: {where: reward}`` as in the paper. A position with mask 0 is stepped over.

    Args:
        rewards: reward of each token.
        mask: 1 on sampled tokens.
        gamma: discount per token, γ.

    Returns:
        Advantages, and the rewards to go.
    """
    on = mask > 0
    to_go = _to_go(rewards, mask, gamma)
    advantages = torch.where(on, masked_whiten(to_go, on), 0)
    return advantages.to(rewards.dtype), to_go.to(rewards.dtype)


def reinforce_plus_plus_baseline(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], groups: Int[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Score minus the group's mean, whitened over all tokens of the batch (Hu et al. 2025, arXiv:2501.03262)."""
    on = mask > 0
    centred = _centred_scores(rewards, mask, groups)[0]
    advantages = torch.where(on, masked_whiten(centred[:, None].expand_as(mask), on), 0).to(rewards.dtype)
    return advantages, advantages


def remax(
    *, rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], baselines: Float[Tensor, " B"], **_: Any
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Reward to go minus the score of the greedy response to the same prompt (Li et al. 2023, arXiv:2310.10505).

    Args:
        rewards: reward of each token.
        mask: 1 on sampled tokens.
        baselines: score of the greedy response, of each response's prompt.

    Returns:
        Advantages, and the rewards to go.
    """
    to_go = _to_go(rewards, mask, 1.0)
    advantages = torch.where(mask > 0, to_go - baselines[:, None], 0)
    return advantages.to(rewards.dtype), to_go.to(rewards.dtype)


def optimal_token_baseline(
    *,
    rewards: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    groups: Int[Tensor, " B"],
    old_log_probs: Float[Tensor, "B T"],
    sum_pi_squared: Float[Tensor, "B T"],
    importance: Float[Tensor, "B T"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Reward to go minus a baseline for each token: the group's rewards to go at that position, weighted by what the
    gradient of each response has varied so far (optimal token baseline, Li et al. 2026, arXiv:2602.07078).

    1 - 2π + Σ_v π(v)² is the squared norm of a token's gradient with respect to the logits. Positions count sampled tokens.
    From where only one response of the group is left there is no baseline.

    Args:
        rewards: reward of each token.
        mask: 1 on sampled tokens.
        groups: equal integers for responses to the same prompt.
        old_log_probs: of the sampled tokens, log π.
        sum_pi_squared: Σ_v π(v)² over the vocabulary, at each token.
        importance: weights of a rollout correction; their squares weigh the variances.

    Returns:
        Advantages, and the rewards to go.
    """
    on, dtype = mask > 0, _statistics_dtype(rewards)
    order = on.logical_not().int().argsort(dim=1, stable=True)  # sampled tokens first, in their order
    there = on.gather(1, order)
    norm = 1 - 2 * old_log_probs.to(dtype).exp() + sum_pi_squared
    weights = norm if importance is None else norm * importance.square()
    weights = torch.where(there, weights.gather(1, order), 0).cumsum(1)
    to_go = _to_go(rewards, mask, 1.0)
    packed = to_go.gather(1, order)
    total = _total_of(groups)
    baseline = total(packed * weights) / (total(weights) + 1e-8)
    baseline = torch.where(total(there.to(dtype)) > 1, baseline, 0)
    packed = torch.where(there, packed - baseline, 0)
    advantages = torch.zeros_like(packed).scatter(1, order, packed)
    return advantages.to(rewards.dtype), to_go.to(rewards.dtype)


def group_statistics(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Each row's score minus its group's mean, the group's unbiased deviation and its size; valid members only count.

    A group of one has mean 0 and deviation 1. Where all members are equal the difference and the deviation are
    exactly 0: means are taken of what exceeds the group's lowest score, which also keeps small differences of large
    scores.
    """
    sum_of = _total_of(groups)

    def total(x: Tensor) -> Tensor:
        return sum_of(torch.where(valid, x, 0))

    size = total(torch.ones_like(scores))
    excess = scores + _highest(-scores, groups, valid)
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
    scores, valid = _scores(rewards, mask)
    return group_statistics(scores, groups, valid)


def _scores(
    rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Sum of each response's rewards, and whether it has any token."""
    on = mask > 0
    return torch.where(on, rewards.to(_statistics_dtype(rewards)), 0).sum(dim=1), on.any(dim=1)


def _total_of(groups: Int[Tensor, " B"]) -> Callable[[Tensor], Tensor]:
    """A function: (B, …) -> each row's sum over the rows of its group."""
    index = torch.unique(groups, return_inverse=True)[1]
    return lambda x: torch.zeros_like(x).index_add(0, index, x)[index]


def _highest(scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], valid: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Of the valid members of each row's group; -inf if there is none."""
    index = torch.unique(groups, return_inverse=True)[1]
    none = torch.full_like(scores, -torch.inf)
    return none.scatter_reduce(0, index, torch.where(valid, scores, -torch.inf), "amax")[index]


def _backward(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    on: Bool[Tensor, "B T"],
    gamma: float,
    lam: float | Float[Tensor, " B"],
) -> Float[Tensor, "B T"]:
    """The recursion of `gae` from the last token to the first; 0 where masked."""
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(on[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(on[:, t], values[:, t], next_value)
        columns.append(next_advantage)
    return torch.where(on, torch.stack(columns[::-1], dim=1), 0)


def _to_go(rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], gamma: float) -> Float[Tensor, "B T"]:
    """Discounted sum of the rewards from each sampled token on."""
    on = mask > 0
    r = torch.where(on, rewards.to(_statistics_dtype(rewards)), 0)
    return _backward(r, torch.zeros_like(r), on, gamma, 1.0)


def _per_token(
    advantages: Float[Tensor, " B"], rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    spread = torch.where(mask > 0, advantages[:, None], 0).to(rewards.dtype)
    return spread, spread


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
