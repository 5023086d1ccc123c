r"""Losses of policy and critic as plain functions: per-token losses first, weights and sums after.

    policy loss     name(log_probs, old_log_probs, advantages, mask, *, …, **_) -> (token_losses (B, T), metrics)
    aggregation     loss = Σ_t w_t · l_t      w = token_weights(mask, mode), see `modules.aggregation`

    l = clamp(log_probs - old_log_probs, ±20)      ρ = e^l      clip(x) = clamp(x, 1 - low, 1 + high)
    m = mean of l over a response                  s = e^m      sg: no gradient      π = e^log_probs
    ppo       L = max(-A·ρ, -A·clip(ρ))      and for A < 0: min(L, -A·dual)
    gspo      max(-A·s, -A·clip(s))          the gradient of s at a token is s · that of its log-prob
    gmpo      -A·exp(mean of y)              y = l, bounded by high where A > 0, by -low where A < 0
    cispo     -A·sg(clip(ρ))·log_probs
    sapo      -A·σ(τ(ρ - 1))·4/τ             τ of its own for A > 0 and A <= 0
    gpg       -A·log_probs
    dro       -A·log_probs + β/2·l²
    dppo_tv   -A·sg(min(ρ, cap))·log_probs   unless A > 0: π - π_old > high, A <= 0: π - π_old < -low
    dppo_kl   the same                       unless A > 0: kl > high and π > π_old, A <= 0: kl > low and π < π_old
    clip_cov  max(-A·ρ, -A·clip(ρ))          0 for some tokens of medium covariance c
    kl_cov    -A·ρ                           + coef·|l| for the tokens of largest c
              c = (A - mean A)·(log_probs - mean log_probs)

Constraints. Rows are whole responses. What a loss selects from all tokens of an optimizer step is found first, by a function of
`SELECTIONS`. ``mask`` is 1 on the tokens that count; whatever stands elsewhere (1e3, NaN) reaches neither loss nor gradient.
Metrics are detached (B, T) tensors: the caller averages them with the loss's token weights, so that they too do not depend on
the split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from jsonargparse.typing import ClosedUnitInterval
from torch import Tensor

# found here, too: all that a loss is made of
from lightning_rlhf.modules.aggregation import Aggregation as Aggregation
from lightning_rlhf.modules.aggregation import aggregate as aggregate
from lightning_rlhf.modules.aggregation import token_weights as token_weights
from lightning_rlhf.modules.kl import MAX_LOG_RATIO as MAX_LOG_RATIO
from lightning_rlhf.modules.kl import KLKind as KLKind
from lightning_rlhf.modules.kl import kl_estimate as kl_estimate
from lightning_rlhf.modules.numbers import NonNegativeFloat, PositiveFloat

PolicyLoss = tuple[Float[Tensor, "B T"], dict[str, Float[Tensor, "B T"]]]
"""Token losses and metrics, both 0 where masked. The arguments of all policy losses are those of `ppo`."""


def ppo(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = 3.0,
    **_: Any,
) -> PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347), upper clip of its own (DAPO, Yu et al. 2025,
    arXiv:2503.14476), dual clip (Ye et al. 2020, arXiv:1912.09729).

    Args:
        log_probs: of the policy that is trained, with gradient.
        old_log_probs: of the policy that the rollout's update began with.
        advantages: per token.
        mask: 1 on the tokens that count.
        clip_low: ρ gains nothing below 1 - clip_low.
        clip_high: ρ gains nothing above 1 + clip_high.
        clip_dual: bound of the loss at negative advantages in units of -A, above 1; None leaves it unbounded.

    Returns:
        Token losses, and metrics: clip_fraction, clip_fraction_lower (dual clip), ppo_kl (old - new log-prob).

    Raises:
        ValueError: ``clip_dual`` not above 1.
    """
    if clip_dual is not None and clip_dual <= 1.0:
        raise ValueError(f"clip_dual must be above 1, or null to switch it off, got {clip_dual}")
    _new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    losses, clipped = _clipped(log_ratio.exp(), gain, clip_low, clip_high)
    lower = torch.zeros_like(clipped)
    if clip_dual is not None:
        bound = -gain * clip_dual
        lower = (gain < 0) & (losses > bound)
        losses = torch.where(gain < 0, torch.minimum(losses, bound), losses)
    return losses, _metrics(log_ratio, clipped, clip_fraction_lower=lower)


def gspo(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    **_: Any,
) -> PolicyLoss:
    """One ratio for a whole response, the geometric mean of its tokens' (GSPO-token, Zheng et al. 2025, arXiv:2507.18071).

    Bounds are far narrower than those of `ppo`, since means vary less.

    Args:
        clip_low: s gains nothing below 1 - clip_low.
        clip_high: s gains nothing above 1 + clip_high.
    """
    new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    mean = _response_mean(log_ratio, mask).detach()
    ratio = (new - new.detach() + mean).clamp(max=10.0).exp()
    losses, clipped = _clipped(ratio, gain, clip_low, clip_high)
    return losses, _metrics(log_ratio, clipped)


def gmpo(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    **_: Any,
) -> PolicyLoss:
    """Geometric mean of the tokens' bounded ratios (Zhao et al. 2025, arXiv:2507.20673); A is the mean over a response.

    Args:
        clip_low: bound of a log-ratio from below where A < 0.
        clip_high: bound of a log-ratio from above where A > 0.
    """
    _new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    sign = gain.sign()
    gained = sign * log_ratio
    bound = torch.where(gain > 0, gain.new_tensor(clip_high), clip_low)
    bounded = torch.minimum(gained, bound)
    ratio = _response_mean(sign * bounded, mask).exp()
    losses = torch.where(mask > 0, -_response_mean(gain, mask) * ratio, 0)
    return losses, _metrics(log_ratio, gained > bound)


def cispo(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **_: Any,
) -> PolicyLoss:
    """Policy gradient weighted by the clipped ratio: every token keeps a gradient (MiniMax-M1, 2025, arXiv:2506.13585).

    Args:
        clip_low: weights are at least 1 - clip_low. The paper's is 1: no bound.
        clip_high: weights are at most 1 + clip_high.
    """
    new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -gain * weight * new, _metrics(log_ratio, weight != ratio)


def sapo(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    tau_positive: PositiveFloat = 1.0,
    tau_negative: PositiveFloat = 1.05,
    **_: Any,
) -> PolicyLoss:
    """A sigmoid of the ratio in place of a clip (soft adaptive policy optimisation, Gao et al. 2025, arXiv:2511.20347).

    Args:
        tau_positive: how fast the gradient fades with the distance from the old policy, where A > 0.
        tau_negative: the same where A <= 0.
    """
    _new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    tau = torch.where(gain > 0, gain.new_tensor(tau_positive), tau_negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau
    return -gain * gate, _metrics(log_ratio)


def gpg(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    **_: Any,
) -> PolicyLoss:
    """The plain policy gradient, without ratio and clip (REINFORCE; GPG, Chu et al. 2025, arXiv:2504.02546)."""
    new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    return -gain * new, _metrics(log_ratio)


def dro(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    beta: NonNegativeFloat = 0.1,
    **_: Any,
) -> PolicyLoss:
    """Policy gradient with a square around the old policy (direct reward optimisation, Richemond et al. 2024,
    arXiv:2405.19107; Kimi k1.5, 2025, arXiv:2501.12599).

    Args:
        beta: weight of the square, β.
    """
    new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    return -gain * new + 0.5 * beta * log_ratio.square(), _metrics(log_ratio)


def dppo_tv(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: PositiveFloat = 20.0,
    **_: Any,
) -> PolicyLoss:
    """Tokens whose probability has moved too far in the direction of A teach nothing (DPPO with the binary total variation,
    Qi et al. 2026, arXiv:2602.04879).

    Args:
        clip_low: how far a probability may fall where A <= 0.
        clip_high: how far a probability may rise where A > 0.
        cap: bound of the ratio.
    """
    new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    moved = new.detach().exp() - (new - log_ratio).detach().exp()
    far = torch.where(gain > 0, moved > clip_high, moved < -clip_low)
    return _trusted(new, log_ratio, gain, far, cap)


def dppo_kl(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    cap: PositiveFloat = 20.0,
    **_: Any,
) -> PolicyLoss:
    """`dppo_tv` with KL(old, new) between the token and all others, π·log(π_old/π) and its complement, as the distance.

    Args:
        clip_low: largest divergence where A <= 0 and the probability has fallen.
        clip_high: largest divergence where A > 0 and the probability has risen.
        cap: bound of the ratio.
    """
    new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    moved = log_ratio.detach()
    now, old = new.detach().exp(), (new.detach() - moved).exp()
    divergence = -old * moved + (1 - old) * ((1 - old + 1e-8) / (1 - now + 1e-8)).log()
    far = torch.where(gain > 0, (divergence > clip_high) & (moved > 0), (divergence > clip_low) & (moved < 0))
    return _trusted(new, log_ratio, gain, far, cap)


def clip_cov(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: ClosedUnitInterval = 2e-4,
    lowest: float = 1.0,
    highest: float = 5.0,
    chosen: Bool[Tensor, "B T"] | None = None,
    **_: Any,
) -> PolicyLoss:
    """`ppo` without dual clip, where some tokens that cost most entropy teach nothing (Cui et al. 2025, arXiv:2505.22617).

    Args:
        clip_low: ρ gains nothing below 1 - clip_low.
        clip_high: ρ gains nothing above 1 + clip_high.
        share: of all tokens, without loss; at least one.
        lowest: of the covariances among which tokens are drawn.
        highest: of these covariances.
        chosen: the tokens without loss; None selects them from these tensors by `select_clip_cov`.
    """
    _new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    losses, clipped = _clipped(log_ratio.exp(), gain, clip_low, clip_high)
    if chosen is None:
        tensors = (log_probs, old_log_probs, advantages, mask)
        options = {"clip_low": clip_low, "clip_high": clip_high, "share": share, "lowest": lowest, "highest": highest}
        chosen = select_clip_cov(*tensors, **options)
    return torch.where(chosen, 0, losses), _metrics(log_ratio, clipped | chosen)


def kl_cov(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    coef: NonNegativeFloat = 1.0,
    share: ClosedUnitInterval = 2e-4,
    chosen: Bool[Tensor, "B T"] | None = None,
    **_: Any,
) -> PolicyLoss:
    """No clip; the tokens that cost most entropy are held back by |l| (Cui et al. 2025, arXiv:2505.22617).

    Args:
        coef: weight of |l|.
        share: of all tokens, with |l|; at least one.
        chosen: the tokens with |l|; None selects them from these tensors by `select_kl_cov`.
    """
    _new, log_ratio, gain = _inputs(log_probs, old_log_probs, advantages, mask)
    if chosen is None:
        chosen = select_kl_cov(log_probs, old_log_probs, advantages, mask, share=share)
    losses = -gain * log_ratio.exp() + torch.where(chosen, coef * log_ratio.abs(), 0)
    return losses, {"ppo_kl": log_ratio.detach().abs()}


def select_clip_cov(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    share: ClosedUnitInterval = 2e-4,
    lowest: float = 1.0,
    highest: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    seed: int = 0,
) -> Bool[Tensor, "B T"]:
    """Some of the tokens between two covariances that are not clipped anyway, drawn at random.

    Args:
        share: how many, of all tokens; at least one.
        lowest: covariances above this one.
        highest: covariances below this one.
        clip_low: of `clip_cov`.
        clip_high: of `clip_cov`.
        seed: of the draw.
    """
    _new, log_ratio, gain = _inputs(log_probs.detach(), old_log_probs, advantages, mask)
    clipped = _clipped(log_ratio.exp(), gain, clip_low, clip_high)[1]
    covariance = _covariance(log_probs, advantages, mask)
    candidates = (mask > 0) & ~clipped & (covariance > lowest) & (covariance < highest)
    lots = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).to(mask.device)
    return _largest(torch.where(candidates, lots, -torch.inf), mask, share)


def select_kl_cov(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    share: ClosedUnitInterval = 2e-4,
) -> Bool[Tensor, "B T"]:
    """The tokens of largest covariance.

    Args:
        share: how many, of all tokens; at least one.
    """
    return _largest(_covariance(log_probs, advantages, mask), mask, share)


SELECTIONS: dict[Callable[..., Any], Callable[..., Bool[Tensor, "B T"]]] = {
    clip_cov: select_clip_cov,
    kl_cov: select_kl_cov,
}
"""What a loss needs as ``chosen`` from ALL tokens of an optimizer step: called with its tensors and the options that it lists."""


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip: float | None = 0.5,
) -> tuple[Float[Tensor, "B T"], dict[str, Float[Tensor, "B T"]]]:
    """Half the larger of (v - R)² and (clip(v, v_old ± clip) - R)² (the value clipping of the PPO code base).

    Args:
        values: of the critic that is trained, with gradient.
        old_values: of the critic that the rollout's update began with.
        returns: the targets R.
        mask: 1 on the tokens that count.
        clip: how far a value may move per rollout before its gradient ends; None switches it off.

    Returns:
        Token losses, and the metric clip_fraction.
    """
    on = mask > 0
    v, old, target = (torch.where(on, x, 0) for x in (values, old_values.detach(), returns))
    free = (v - target).square()
    near = v if clip is None else torch.where((v - old).abs() > clip, old + (v - old).clamp(-clip, clip), v)
    clipped = (near - target).square()
    return 0.5 * torch.maximum(free, clipped), {"clip_fraction": (clipped > free).to(free.dtype)}


def _inputs(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs, l and A, all 0 where masked."""
    on = mask > 0
    log_ratio = torch.where(on, log_probs - old_log_probs.detach(), 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(on, log_probs, 0), log_ratio, torch.where(on, advantages, 0)


def _clipped(ratio: Tensor, gain: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The larger of free and clipped loss, and whether that is the clipped one."""
    free, bound = -gain * ratio, -gain * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, bound), bound > free


def _trusted(new: Tensor, log_ratio: Tensor, gain: Tensor, far: Tensor, cap: float) -> PolicyLoss:
    """Policy gradient weighted by the ratio up to ``cap``, 0 for the tokens that are too far."""
    weight = torch.where(far, 0, log_ratio.detach().exp().clamp(max=cap))
    return -gain * weight * new, _metrics(log_ratio, far)


def _metrics(log_ratio: Tensor, clipped: Tensor | None = None, **more: Tensor) -> dict[str, Tensor]:
    clips = more if clipped is None else {"clip_fraction": clipped, **more}
    return {"ppo_kl": -log_ratio.detach()} | {name: x.to(log_ratio.dtype) for name, x in clips.items()}


def _response_mean(x: Tensor, mask: Tensor) -> Tensor:
    """(B, 1), of values that are 0 where masked."""
    return x.sum(1, keepdim=True) / (mask > 0).sum(1, keepdim=True).clamp(min=1)


def _covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Of log-prob and advantage at each token, with the means over all tokens; -inf where masked."""
    on = mask > 0

    def centred(x: Tensor) -> Tensor:
        taken = torch.where(on, x.detach(), 0).double()
        return taken - taken.sum() / on.sum().clamp(min=1)

    return torch.where(on, centred(advantages) * centred(log_probs), -torch.inf)


def _largest(x: Tensor, mask: Tensor, share: float) -> Tensor:
    """The ``share`` of the tokens with the largest ``x``, at least one, but none of -inf."""
    count = min(x.numel(), max(1, int(share * int((mask > 0).sum()))))
    chosen = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    chosen[x.flatten().topk(count).indices] = True
    return chosen.view_as(x) & x.isfinite()


OWN_AGGREGATION: dict[Callable[..., Any], Aggregation] = dict.fromkeys((gspo, gmpo, sapo), "seq-mean-token-mean")
"""Of the losses whose papers average over responses first; the others' is token-mean."""
