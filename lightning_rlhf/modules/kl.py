"""The distance to the reference model as a setting; its estimates are `losses.kl_estimate`.

in the loss     loss + β · Σ_t w_t · kl_t
in the reward   r_t - β · kl_t
adaptive        β ← β · (1 + clamp(kl / target - 1, ±0.2) · n / horizon)      n responses an iteration
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from lightning_rlhf.modules.losses import KLKind


@dataclass(frozen=True)
class KL:
    """Distance to the reference model.

    Args:
        coef: weight β; 0 switches it off and no reference is loaded.
        estimator: per-token estimate, see `losses.kl_estimate`.
        where: added to the loss, or taken off the token rewards.
        target: the distance, in nats per token, that ``coef`` is steered to from iteration to iteration (Ziegler et al. 2019,
            arXiv:1909.08593); null keeps ``coef`` as it is.
        horizon: responses in which a distance 20 % off the target changes the coefficient by 20 %.
    """

    coef: NonNegativeFloat = 0.0
    estimator: KLKind = "k3"
    where: Literal["loss", "reward"] = "loss"
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10000

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

    def adapted(self, coef: float, measured: float, responses: int) -> float:
        """The coefficient after an iteration of ``responses`` in which the distance was ``measured``."""
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * responses / self.horizon)
