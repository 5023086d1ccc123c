r"""Rollout correction: the engine that sampled (μ, by its own log-probs) against the policy that the update begins with (π).

    x = old_log_probs - sampler_log_probs      ρ = e^clamp(x, ±20)
    loss     Σ_t w_t · c_t · l_t               c = min(ρ, cap)      or, with a floor, ρ inside [floor, cap], 0 outside
    level    token      x of the token
             sequence   Σ_t x over the response
             geometric  mean_t x over the response

    rejection   k1 = -x      k2 = x²/2      k3 = e^x - x - 1      of a token, or their sum, mean or maximum over a response

Weights multiply the loss. Rejected tokens leave it, and its token weights with it, as if they had not been sampled; they stay in
advantages and baselines.

Constraints. Rows are whole responses. A token whose log-prob either side does not know (NaN, infinite) counts as x = 0.
Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from lightning_rlhf.modules.losses import MAX_LOG_RATIO
from lightning_rlhf.modules.metrics import Metrics

REJECTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class Correction:
    """Importance weights between the engine that sampled and the policy that the update begins with, and what is left out.

    Args:
        level: token: each token its own ratio; sequence: the product of a response's ratios for all of its tokens;
            geometric: their geometric mean. null weighs nothing.
        cap: larger weights become this one (Espeholt et al. 2018, arXiv:1802.01561, "IMPALA").
        floor: smaller ones become 0, and so do those above ``cap`` (IcePop); None leaves them.
        normalize: divide by the mean weight of the iteration's tokens (of its responses, unless ``level`` is token).
        reject: measures of distance and their bounds, all of which must hold: ``{token_k1: [0.5, 2.0]}`` keeps
            μ/π inside, ``{seq_mean_k3: 0.002}`` keeps values up to the bound. Measures: `REJECTIONS`.
    """

    level: Literal["token", "sequence", "geometric"] | None = "token"
    cap: PositiveFloat = 2.0
    floor: NonNegativeFloat | None = None
    normalize: bool = False
    reject: dict[str, float | list[float]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"model.correction.floor must be below cap={self.cap:g}, got {self.floor:g}")
        if self.level is None and not self.reject:
            raise ValueError("model.correction.level null needs reject, or leave out model.correction")
        for name, bound in (self.reject or {}).items():
            if name not in REJECTIONS:
                raise ValueError(f"model.correction.reject: {name!r} is none of {', '.join(REJECTIONS)}")
            pair = isinstance(bound, list)
            if pair != name.endswith("k1"):
                how = "a list of two positive bounds" if name.endswith("k1") else "one upper bound"
                raise ValueError(f"model.correction.reject: {name} needs {how}, got {bound}")
            if isinstance(bound, list) and not (len(bound) == 2 and 0 < bound[0] < bound[1]):
                raise ValueError(
                    f"model.correction.reject: {name} needs two positive bounds, the lower one first, got {bound}"
                )

    @property
    def needs_batch(self) -> bool:
        """Whether it depends on the whole iteration or changes what counts: then log-probs must be known before the update."""
        return self.normalize or bool(self.reject)


def importance_weights(
    old_log_probs: Float[Tensor, "B T"],
    sampler_log_probs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    correction: Correction,
) -> Float[Tensor, "B T"]:
    """exp(old - sampler), bounded; of a token 1 where either is no number, and 0 where the mask is. Not normalised.

    Args:
        old_log_probs: of the policy that the update begins with, by the trainer.
        sampler_log_probs: of the policy and the engine that drew the tokens, by that engine.
        mask: 1 on the tokens that count.
    """
    on = mask > 0
    log_ratio = _log_ratio(old_log_probs, sampler_log_probs, on)
    log_ratio = _OVER[correction.level](log_ratio, on.sum(1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    free = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = free.clamp(max=correction.cap)
    if correction.floor is not None:
        weights = torch.where((free >= correction.floor) & (free <= correction.cap), free, 0)
    if correction.level == "token":  # also where cap and floor leave 1 out
        weights = torch.where(_known(old_log_probs, sampler_log_probs), weights, 1)
    return weights * on


def mean_weight(weights: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], correction: Correction) -> Float[Tensor, ""]:
    """What ``normalize`` divides by: the mean over tokens, or over responses of their means; 1 if that is 0."""
    on = (mask > 0).to(weights.dtype)
    lengths = on.sum(1)
    if correction.level == "token":
        mean = (weights * on).sum() / lengths.sum().clamp(min=1)
    else:
        mean = ((weights * on).sum(1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1)


def kept(
    old_log_probs: Float[Tensor, "B T"],
    sampler_log_probs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    correction: Correction,
) -> Float[Tensor, "B T"]:
    """``mask`` without the tokens (or whole responses) that one of the measures in ``reject`` rejects."""
    on = mask > 0
    x = _log_ratio(old_log_probs, sampler_log_probs, on)
    keep, lengths = on, on.sum(1, keepdim=True).clamp(min=1)
    for name, bound in (correction.reject or {}).items():
        over, _, kind = name.rpartition("_")
        distance = _OVER[over](_DISTANCE[kind](x), lengths)
        if isinstance(bound, list):
            low, high = torch.tensor(bound, dtype=torch.float64).log().tolist()
            keep = keep & (distance >= low) & (distance <= high)
        else:
            keep = keep & (distance <= bound)
    return mask * keep


def off_policy(
    old_log_probs: Float[Tensor, "B T"], sampler_log_probs: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> dict[str, tuple[Tensor, Tensor]]:
    """How far the engine is from the trainer: (values, weights) by name, to be averaged over any split of the responses.

    kl μ‖π estimated by k1 and k3; ``chi2`` = E[ρ²] - 1 of tokens and of responses; perplexities of the responses under
    both, and the mean (absolute) difference of their logarithms. ``ppl_ratio`` is that of π to μ.
    """
    on = mask > 0
    x = _log_ratio(old_log_probs, sampler_log_probs, on)
    known = (on & sampler_log_probs.isfinite() & old_log_probs.isfinite()).to(x.dtype)
    rows = known.sum(1)
    ratio = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def log_ppl(log_probs: Tensor) -> Tensor:
        return -torch.where(known > 0, log_probs.detach(), 0).sum(1) / rows.clamp(min=1)

    ours, theirs = log_ppl(old_log_probs), log_ppl(sampler_log_probs)
    difference = ours - theirs
    per_token = {"kl": -x, "k3_kl": torch.expm1(ratio) - ratio, "chi2_token": torch.expm1(2 * ratio)}
    per_response = {
        "training_ppl": ours.exp(),
        "training_log_ppl": ours,
        "rollout_ppl": theirs.exp(),
        "rollout_log_ppl": theirs,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "chi2_seq": torch.expm1(2 * (x * known).sum(1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
    }
    there = (rows > 0).to(x.dtype)
    return {n: (v, known) for n, v in per_token.items()} | {n: (v, there) for n, v in per_response.items()}


def add_off_policy(
    metrics: Metrics, old_log_probs: Tensor | None, sampler_log_probs: Tensor | None, mask: Float[Tensor, "B T"]
) -> None:
    """`off_policy` as the means ``rollout/…``."""
    assert old_log_probs is not None
    assert sampler_log_probs is not None
    for name, (values, weights) in off_policy(old_log_probs, sampler_log_probs, mask).items():
        metrics.mean(f"rollout/{name}", values, weights)


_DISTANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(x.clamp(max=MAX_LOG_RATIO)) - x.clamp(max=MAX_LOG_RATIO),
}
_OVER: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    None: lambda x, lengths: torch.zeros_like(x),
    "token": lambda x, lengths: x,
    "seq_sum": lambda x, lengths: x.sum(1, keepdim=True),
    "seq_mean": lambda x, lengths: x.sum(1, keepdim=True) / lengths,
    "seq_max": lambda x, lengths: x.amax(1, keepdim=True),
}
_OVER |= {"sequence": _OVER["seq_sum"], "geometric": _OVER["seq_mean"]}
"""From values of tokens, 0 where masked, to one per token or per response, given the lengths (B, 1)."""


def _log_ratio(old: Tensor, sampler: Tensor, on: Bool[Tensor, "B T"]) -> Tensor:
    return torch.where(on & _known(old, sampler), old.detach() - sampler, 0)


def _known(old: Tensor, sampler: Tensor) -> Bool[Tensor, "B T"]:
    return sampler.isfinite() & old.isfinite()
