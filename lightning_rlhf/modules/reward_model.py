"""A reward model that learns which of two answers is better."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError
from transformers import AutoModelForSequenceClassification

from lightning_rlhf.flops import Passes
from lightning_rlhf.hf_config import padding_of
from lightning_rlhf.modules.batching import MicroBatch
from lightning_rlhf.modules.critic import Critic, build_critic
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.numbers import NonNegativeFloat
from lightning_rlhf.modules.preferences import bradley_terry
from lightning_rlhf.modules.score_head import scored_part
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.supervised import SupervisedLightningModule
from lightning_rlhf.modules.training import passes_of
from lightning_rlhf.types import Examples


class RewardModelLightningModule(SupervisedLightningModule):
    """A scalar score r at the last token of an answer, from pairs: the mean of -log σ(r_w - r_l - margin).

    The head starts at random, N(0, 1/(h+1)) (Stiennon et al. 2020, arXiv:2009.01325), or is that of ``model`` if this is a
    sequence-classification model with one label. What is exported is one.

    Args:
        model: local folder or hub id of a language model or of a reward model, or ``random:tiny``.
        center_rewards_coefficient: weight of (r_w + r_l)², which keeps the mean score near 0 (Eisenstein et al. 2023,
            arXiv:2312.09244); TRL's name.
        **kwargs: see `SupervisedLightningModule`.
    """

    example_size, ends_only = 2, True

    def __init__(self, model: str, center_rewards_coefficient: NonNegativeFloat = 0.0, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        if self.settings.lora is not None and self.settings.lora.adapter is not None:
            raise ValueError(
                "model.lora.adapter is a policy's, that of a reward model starts anew: merge it into model.model first"
                " (lightning-rlhf export), or leave it out"
            )
        self.center_rewards_coefficient = center_rewards_coefficient
        self.reward_model: Critic = None  # type: ignore[assignment]
        self._calibration: BinaryCalibrationError | None = None

    @property
    def roles(self) -> dict[str, ModelSettings]:
        return {"reward_model": self.settings}

    @property
    def learning_rates(self) -> dict[str, float]:
        return {"reward_model": self.lr}

    @property
    def root(self) -> Critic:
        return self.reward_model

    def check_models(self) -> int:
        if type(self.settings.config) not in AutoModelForSequenceClassification._model_mapping:
            raise NotImplementedError(
                f"{self.settings.key}: transformers has no sequence-classification model for a"
                f" {self.settings.config.model_type}, the result could not be loaded: take another model"
            )
        return super().check_models()

    def configure_model(self) -> None:
        if self.reward_model is None:
            std = (self.settings.config.get_text_config().hidden_size + 1) ** -0.5
            self.reward_model = build_critic(
                self.settings, self.strategy, seed=self.seed, bias=False, std=std, role="reward model"
            )

    @cached_property
    def flops(self) -> list[Passes]:
        return passes_of(self.reward_model, 1, 1, 1)

    def read(self, examples: Examples) -> Examples:
        padding = padding_of(self.settings.config, self.tokenizer)
        return replace(examples, sequences=[scored_part(one, padding) for one in examples.sequences])

    def loss(
        self, examples: Examples, batch: MicroBatch, prepared: Any, metrics: Metrics, measured: bool
    ) -> Float[Tensor, ""]:
        chosen, rejected = self.reward_model(batch.packed).view(-1, 2).unbind(1)
        margin = None if examples.margins is None else examples.margins[batch.rows[::2] // 2]
        losses = bradley_terry(chosen, rejected, margin)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * (chosen + rejected).square()
        difference = (chosen - rejected).detach()
        metrics.mean("loss", losses)
        metrics.mean("accuracy", (difference > 0).float())
        metrics.mean("margin", difference)
        metrics.mean("rewards/chosen", chosen)
        metrics.mean("rewards/rejected", rejected)
        if self._calibration is not None:
            self._calibration.update(difference.abs().sigmoid(), (difference > 0).long())
        return losses.sum() / len(examples)

    # -- calibration: whether pairs that are told apart with probability p are told apart rightly as often

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._calibration = BinaryCalibrationError(n_bins=15).to(self.device)

    def validated(self, reduced: dict[str, float]) -> dict[str, float]:
        assert self._calibration is not None
        calibration, self._calibration = self._calibration, None
        return reduced | {"calibration_error": float(calibration.compute())}
