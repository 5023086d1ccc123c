"""Direct preference optimisation: pairs train the policy, without a reward model and without rollouts."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.flops import Passes
from lightning_rlhf.modules.batching import MicroBatch
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.numbers import NonNegativeFloat, PositiveFloat
from lightning_rlhf.modules.preferences import LOSSES
from lightning_rlhf.modules.supervised import SupervisedLightningModule
from lightning_rlhf.modules.training import passes_of
from lightning_rlhf.types import Examples


class DPOLightningModule(SupervisedLightningModule):
    """DPO (Rafailov et al. 2023, arXiv:2305.18290) and its relatives; the mean over the pairs of an optimizer step.

    The reference is the model that training starts from, frozen in bfloat16, or with ``lora`` the policy without its adapter.

    Args:
        model: local folder or hub id of the policy and of its reference, or ``random:tiny``.
        loss_type: sigmoid, hinge or ipo, see `modules.preferences`; TRL's names.
        beta: how strongly the reference holds; of ipo the paper's τ.
        label_smoothing: of the sigmoid loss: the probability that a label is wrong.
        **kwargs: see `SupervisedLightningModule`.
    """

    example_size = 2

    def __init__(
        self,
        model: str,
        loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
        beta: PositiveFloat = 0.1,
        label_smoothing: NonNegativeFloat = 0.0,
        lr: PositiveFloat = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, **kwargs)
        if label_smoothing and (loss_type != "sigmoid" or label_smoothing >= 0.5):
            raise ValueError(
                f"model.label_smoothing must be below 0.5 and is of the sigmoid loss, got {label_smoothing} for {loss_type}: set"
                " it to 0"
            )
        self.loss_function = LOSSES[loss_type]
        self.beta, self.label_smoothing = beta, label_smoothing

    @property
    def needs_reference(self) -> bool:
        return True

    @cached_property
    def flops(self) -> list[Passes]:
        reference = passes_of(self.actor, None, 1, 0, adapted=False)
        return passes_of(self.actor, None, 1, 1) + reference

    @torch.no_grad()
    def prepare(self, batches: list[MicroBatch]) -> list[Float[Tensor, "b T"]]:
        """Log-probs of the reference."""
        with self.as_reference() as root:
            found = [root(batch.packed, 1.0)[0] for batch in batches]
        self.strategy.reshard(root)
        return found

    def loss(
        self, examples: Examples, batch: MicroBatch, prepared: Any, metrics: Metrics, measured: bool
    ) -> Float[Tensor, ""]:
        mask = batch.packed.response_mask
        log_probs, reference = (values.sum(1) for values in (self.actor(batch.packed, 1.0)[0], prepared))
        chosen, rejected = (log_probs - reference).view(-1, 2).unbind(1)
        losses = self.loss_function(
            chosen, rejected, *mask.sum(1).view(-1, 2).unbind(1), beta=self.beta, label_smoothing=self.label_smoothing
        )
        rewards = {"chosen": self.beta * chosen.detach(), "rejected": self.beta * rejected.detach()}
        margins = rewards["chosen"] - rewards["rejected"]
        metrics.mean("loss", losses)
        for name, side in zip(rewards, log_probs.detach().view(-1, 2).unbind(1), strict=True):
            metrics.mean(f"rewards/{name}", rewards[name])
            metrics.mean(f"logps/{name}", side)
        metrics.mean("rewards/accuracies", (margins > 0).float())
        metrics.mean("rewards/margins", margins)
        return losses.sum() / len(examples)
