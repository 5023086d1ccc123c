"""The distance to the reference model: estimates, and how it is used.

    d = log_probs - ref_log_probs      c = clamp(-d, ±20)
    k1 = d      abs = |d|      k2 = d²/2      k3 = clamp(e^c - c - 1, ±10)
    suffix +   the value of the estimator, the gradient of k2

in the loss     loss + β · Σ_t w_t · kl_t
in the reward   r_t - β · kl_t
adaptive        β ← β · (1 + clamp(kl / target - 1, ±0.2) · min(n / horizon, 1))      n responses an iteration
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from jsonargparse.typing import PositiveInt
from torch import Tensor

from lightning_rlhf.modules.numbers import NonNegativeFloat, PositiveFloat

KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before they are exponentiated: e^20 times an advantage is finite in every float type but fp16."""


@dataclass(frozen=True)
class KL:
    """Distance to the reference model.

    Args:
        coef: weight β; 0 switches it off and no reference is loaded.
        estimator: per-token estimate, see `kl_estimate`.
        where: added to the loss, or taken off the token rewards.
        target: the distance, in nats per token, that ``coef`` is steered to from iteration to iteration (Ziegler et al. 2019,
            arXiv:1909.08593); null keeps ``coef`` as it is.
        horizon: responses in which a distance 20 % off the target changes the coefficient by 20 %; in one iteration it changes by
            no more than that.
        refresh_every: iterations after which the reference becomes the policy of then; null keeps the one that it started from.
            It is then part of the checkpoints.
    """

    coef: NonNegativeFloat = 0.0
    estimator: KLKind = "k3"
    where: Literal["loss", "reward"] = "loss"
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10000
    refresh_every: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.where == "loss" and self.estimator in ("k1", "abs"):
            raise ValueError(
                f"model.kl.estimator {self.estimator!r} has no useful gradient in the loss: use {self.estimator + '+'!r}, k2"
                " or k3, or where: reward"
            )
        if self.target is not None and not self.coef:
            raise ValueError(
                "model.kl.target steers model.kl.coef, which must not start at 0: set it, or leave out target"
            )
        if self.refresh_every is not None and not self.coef:
            raise ValueError("model.kl.refresh_every renews the reference, which needs model.kl.coef: set it")

    def adapted(self, coef: float, measured: float, responses: int) -> float:
        """The coefficient after an iteration of ``responses`` in which the distance was ``measured``."""
        assert self.target is not None
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        # the formula alone makes it negative from 5 horizons on
        return coef * (1.0 + error * min(responses / self.horizon, 1.0))


def kl_estimate(
    log_probs: Float[Tensor, "B T"], ref_log_probs: Float[Tensor, "B T"], kind: KLKind
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(policy, reference) from sampled tokens (Schulman, 2020, "Approximating KL divergence").

    k1 is unbiased but, as a loss, has no useful gradient; k2 has the gradient of the true KL on policy, k3 that of
    KL(reference, policy). A kind that ends in ``+`` combines them: its own value, k2's gradient.

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


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    c = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(c) - c).clamp(-10.0, 10.0)


_KL: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": torch.abs, "k2": _k2, "k3": _k3}
