r"""Losses on pairs of answers as plain functions, one value per pair; means over pairs come after.

    reward model (r the scores, m the margin, w winner, l loser)

        bradley_terry   -log σ(r_w - r_l - m)

    direct preference optimisation (Δ = log π(answer) - log π_ref(answer), n the answer's tokens, ε label smoothing)

        h = Δ_w - Δ_l
        sigmoid   -(1-ε) log σ(β h) - ε log σ(-β h)
        hinge     max(0, 1 - β h)
        ipo       (Δ_w / n_w - Δ_l / n_l - 1 / (2β))²

Every function of the second kind takes ``(chosen, rejected, chosen_length, rejected_length, *, beta, label_smoothing)``, each
tensor (pairs,), and returns (pairs,).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry(
    chosen: Float[Tensor, "pairs"], rejected: Float[Tensor, "pairs"], margin: Float[Tensor, "pairs"] | None = None
) -> Float[Tensor, "pairs"]:
    """Negative log-likelihood that the chosen answer wins (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155).

    Args:
        chosen: scores of the better answers.
        rejected: scores of the worse answers.
        margin: how much better, in units of the score (Touvron et al. 2023, arXiv:2307.09288, equation 2).
    """
    return -F.logsigmoid(chosen - rejected - (0.0 if margin is None else margin))


def sigmoid(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    chosen_length: Float[Tensor, "pairs"],
    rejected_length: Float[Tensor, "pairs"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7); with smoothing conservative DPO (Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf): labels are wrong with probability ``label_smoothing``.

    Args:
        chosen: Δ_w, the sum over the answer's tokens.
        rejected: Δ_l.
        chosen_length: tokens of the answer.
        rejected_length: likewise.
        beta: how strongly the reference holds.
        label_smoothing: ε, below 0.5.
    """
    x = beta * (chosen - rejected)
    return -(1.0 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def hinge(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    chosen_length: Float[Tensor, "pairs"],
    rejected_length: Float[Tensor, "pairs"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """SLiC's calibration loss (Zhao et al. 2023, arXiv:2305.10425) on DPO's rewards (Liu et al. 2023, arXiv:2309.06657). No
    smoothing.
    """
    return torch.relu(1.0 - beta * (chosen - rejected))


def ipo(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    chosen_length: Float[Tensor, "pairs"],
    rejected_length: Float[Tensor, "pairs"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """IPO (Azar et al. 2023, arXiv:2310.12036, equation 17), with means over tokens instead of sums as in TRL. ``beta`` is the
    paper's τ. No smoothing.
    """
    return (chosen / chosen_length - rejected / rejected_length - 1.0 / (2.0 * beta)).square()


LOSSES: dict[str, Any] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo}
"""By their names in TRL."""
