r"""Losses of policy and critic as plain functions: per-token losses first, weights and sums after.

    policy loss     name(log_probs, old_log_probs, advantages, mask, *, …, **_) -> (token_losses (B, T), metrics)
    aggregation     loss = Σ_t w_t · l_t      w = token_weights(mask, mode)

    l = clamp(log_probs - old_log_probs, ±20)      ρ = e^l
    ppo       L = max(-A·ρ, -A·clip(ρ, 1 - low, 1 + high))      and for A < 0: min(L, -A·dual)

    d = log_probs - ref_log_probs      c = clamp(-d, ±20)
    k1 = d      abs = |d|      k2 = d²/2      k3 = clamp(e^c - c - 1, ±10)
    suffix +   the value of the estimator, the gradient of k2

    rollout correction   Σ_t w_t · c_t · l_t      c = min(exp(old_log_probs - sampler_log_probs), cap)

Constraints. Weights must come from the masks of the WHOLE optimizer step (all ranks, all micro-batches); a
micro-batch then takes its rows of them, and the sums of any split add up to the loss. ``mask`` is 1 on the tokens
that count; whatever stands elsewhere (1e3, NaN) reaches neither loss nor gradient. Metrics are detached (B, T)
tensors: the caller averages them with the loss's token weights, so that they too do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before they are exponentiated: e^20 times an advantage is finite in every float type but fp16."""

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


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
) -> tuple[Float[Tensor, "B T"], dict[str, Float[Tensor, "B T"]]]:
    """Clipped surrogate (Schulman et al., 2017), upper clip of its own (DAPO), dual clip (Ye et al., 2020).

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
    on = mask > 0
    log_ratio = torch.where(on, log_probs - old_log_probs.detach(), 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    gain = torch.where(on, advantages, 0)
    ratio = log_ratio.exp()
    free = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(free, clipped)
    lower = torch.zeros_like(on)
    if clip_dual is not None:
        bound = -gain * clip_dual
        lower = (gain < 0) & (losses > bound)
        losses = torch.where(gain < 0, torch.minimum(losses, bound), losses)
    metrics = {
        "clip_fraction": (clipped > free).to(losses.dtype),
        "clip_fraction_lower": lower.to(losses.dtype),
        "ppo_kl": -log_ratio.detach(),
    }
    return losses, metrics


@dataclass(frozen=True)
class Correction:
    """Truncated importance weights between the engine that sampled and the policy that the update begins with.

    Args:
        level: token: each token its own ratio; sequence: the product of a response's ratios for all of its tokens.
        cap: larger weights become this one (Espeholt et al., 2018, "IMPALA").
        floor: smaller ones become 0, and so do those above ``cap`` (IcePop); None leaves them.
    """

    level: Literal["token", "sequence"] = "token"
    cap: PositiveFloat = 2.0
    floor: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"model.correction.floor must be below cap={self.cap:g}, got {self.floor:g}")


def importance_weights(
    old_log_probs: Float[Tensor, "B T"],
    sampler_log_probs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    correction: Correction,
) -> Float[Tensor, "B T"]:
    """exp(old - sampler), bounded; 1 where either is no number, and 0 where the mask is. No gradient.

    Args:
        old_log_probs: of the policy that the update begins with, by the trainer.
        sampler_log_probs: of the policy and the engine that drew the tokens, by that engine.
        mask: 1 on the tokens that count; rows are whole responses.
    """
    on = mask > 0
    known = on & sampler_log_probs.isfinite() & old_log_probs.isfinite()
    log_ratio = torch.where(known, old_log_probs.detach() - sampler_log_probs, 0)
    if correction.level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    free = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = free.clamp(max=correction.cap)
    if correction.floor is not None:
        weights = torch.where((free >= correction.floor) & (free <= correction.cap), free, 0)
    return weights * on


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


def kl_estimate(
    log_probs: Float[Tensor, "B T"], ref_log_probs: Float[Tensor, "B T"], kind: KLKind
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(policy, reference) from sampled tokens (Schulman, 2020, "Approximating KL divergence").

    k1 is unbiased but, as a loss, has no useful gradient; k2 has the gradient of the true KL on policy. A kind that
    ends in ``+`` combines them: its own value, k2's gradient.

    Raises:
        ValueError: unknown ``kind``.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"the KL estimator must be one of {', '.join(get_args(KLKind))}, got {kind!r}")
    d = log_probs - ref_log_probs.detach()
    value = _KL[kind.removesuffix("+")](d)
    if not kind.endswith("+"):
        return value
    surrogate = _k2(d)
    return value.detach() + (surrogate - surrogate.detach())


def token_weights(
    mask: Float[Tensor, "B T"], mode: Aggregation, norm_length: float | None = None
) -> Float[Tensor, "B T"]:
    """The share of each token in the loss of one optimizer step; 0 where the mask is 0, also when all of it is.

    ``mask`` holds every response of the step. N is the number of its tokens, n_i that of response i, and M the number
    of responses with at least one: a fully masked response counts nowhere.

    Args:
        mask: 1 on the tokens that count.
        mode: token-mean 1/N; token-sum 1; seq-mean-token-sum 1/M; seq-mean-token-mean 1/(M·n_i);
            seq-mean-token-sum-norm 1/(M·norm_length).
        norm_length: the constant of the last mode, usually the longest response allowed; None takes T.

    Raises:
        ValueError: unknown ``mode``.
    """
    if mode not in _ROW_WEIGHT:
        raise ValueError(f"the loss aggregation must be one of {', '.join(_ROW_WEIGHT)}, got {mode!r}")
    on = (mask > 0).to(torch.promote_types(mask.dtype, torch.float32))
    lengths = on.sum(dim=1, keepdim=True)
    return on * _ROW_WEIGHT[mode](lengths, norm_length or mask.shape[1])


def aggregate(
    token_losses: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], mode: Aggregation, norm_length: float | None = None
) -> Float[Tensor, ""]:
    """The loss of one optimizer step, Σ token_weights · token_losses; masked losses may be anything."""
    return (token_weights(mask, mode, norm_length) * torch.where(mask > 0, token_losses, 0)).sum()


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    c = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(c) - c).clamp(-10.0, 10.0)


_KL: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": torch.abs, "k2": _k2, "k3": _k3}


def _tokens(lengths: Tensor) -> Tensor:
    return lengths.sum().clamp(min=1)


def _responses(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum().clamp(min=1)


_ROW_WEIGHT: dict[str, Callable[[Tensor, float], Tensor]] = {
    "token-mean": lambda lengths, norm: 1 / _tokens(lengths),
    "token-sum": lambda lengths, norm: torch.ones_like(lengths),
    "seq-mean-token-sum": lambda lengths, norm: 1 / _responses(lengths),
    "seq-mean-token-mean": lambda lengths, norm: 1 / (_responses(lengths) * lengths.clamp(min=1)),
    "seq-mean-token-sum-norm": lambda lengths, norm: 1 / (_responses(lengths) * norm),
}
"""Weight of a token, given the number of tokens of each response (B, 1)."""
