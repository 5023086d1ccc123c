"""How token losses become one loss: Σ_t w_t · l_t with w = token_weights(mask, mode).

Weights must come from the masks of the WHOLE optimizer step (all ranks, all micro-batches); a micro-batch then takes its rows of
them, and the sums of any split add up to the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


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


def _tokens(lengths: Tensor) -> Tensor:
    return lengths.sum().clamp(min=1)


def _responses(lengths: Tensor) -> Tensor:
    return (lengths > 0).to(lengths.dtype).sum().clamp(min=1)


_ROW_WEIGHT: dict[str, Callable[[Tensor, float], Tensor]] = {
    "token-mean": lambda lengths, norm: 1 / _tokens(lengths),
    "token-sum": lambda lengths, norm: torch.ones_like(lengths),
    "seq-mean-token-sum": lambda lengths, norm: 1 / _responses(lengths),
    "seq-mean-token-mean": lambda lengths, norm: 1 / (_responses(lengths) * lengths.clamp(min=1)),
    "seq-mean-token-sum-norm": lambda lengths, norm: 1 / (_responses(lengths) * norm),
}
"""Weight of a token, given the number of tokens of each response (B, 1)."""


def weighted(weights: Float[Tensor, "b T"], token_values: Float[Tensor, "b T"]) -> Float[Tensor, ""]:
    """Σ w x, where a token of weight 0 may be anything."""
    return (weights * torch.where(weights > 0, token_values, 0.0)).sum()
