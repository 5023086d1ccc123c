"""Supervised fine-tuning: the likelihood of what demonstrations show."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.flops import Passes
from lightning_rlhf.modules.aggregation import weighted
from lightning_rlhf.modules.batching import MicroBatch
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.supervised import SupervisedLightningModule
from lightning_rlhf.modules.training import passes_of
from lightning_rlhf.types import Examples


class SFTLightningModule(SupervisedLightningModule):
    """Cross-entropy -1/N Σ log π(token) over the N learned tokens of the whole optimizer step.

    Which tokens are learned, ``data.train_on`` says. Arguments: see `SupervisedLightningModule`.
    """

    @cached_property
    def flops(self) -> list[Passes]:
        return passes_of(self.actor, None, 1, 1)

    def loss(
        self, examples: Examples, batch: MicroBatch, prepared: Any, metrics: Metrics, measured: bool
    ) -> Float[Tensor, ""]:
        mask = batch.packed.response_mask
        log_probs, entropy, *is_top = self.actor(batch.packed, 1.0, with_entropy=measured, with_top=measured)
        metrics.mean("loss", -log_probs, mask)
        metrics.sum("num_tokens", mask.sum())
        if measured:
            metrics.mean("entropy", entropy, mask)
            metrics.mean("mean_token_accuracy", is_top[0], mask)
        return weighted(mask / examples.tokens, -log_probs)

    def validated(self, reduced: dict[str, float]) -> dict[str, float]:
        return reduced | {"perplexity": math.exp(min(reduced["loss"], 700.0))}
