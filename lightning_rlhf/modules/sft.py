"""Supervised fine-tuning: the likelihood of what demonstrations show."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.flops import Passes
from lightning_rlhf.modules.batching import MicroBatch
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.optimized import weighted
from lightning_rlhf.modules.supervised import SupervisedLightningModule
from lightning_rlhf.types import Examples


class SFTLightningModule(SupervisedLightningModule):
    """Cross-entropy of the learned tokens, -1/N Σ log π(token), N those of the whole optimizer step.

    Which tokens are learned, ``data.train_on`` says. Arguments: see `SupervisedLightningModule`.
    """

    @cached_property
    def flops(self) -> list[Passes]:
        return self.update_passes(self.actor)

    def loss(
        self, examples: Examples, batch: MicroBatch, prepared: Any, metrics: Metrics, measured: bool
    ) -> Float[Tensor, ""]:
        mask = examples.mask[batch.rows, : batch.width]
        log_probs, entropy, is_top = self.actor.measured(batch.packed) if measured else (*self.actor(batch.packed, 1.0), None)
        metrics.mean("loss", -log_probs, mask)
        metrics.sum("num_tokens", mask.sum())
        if is_top is not None:
            metrics.mean("entropy", entropy, mask)
            metrics.mean("mean_token_accuracy", is_top, mask)
        return weighted(mask / examples.mask.sum(), -log_probs)

    def validated(self, reduced: dict[str, float]) -> dict[str, float]:
        return reduced | {"perplexity": math.exp(reduced["loss"])}
