"""Proximal policy optimisation with a critic."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt
from torch import Tensor

from lightning_rlhf.flops import Passes
from lightning_rlhf.modules.advantages import masked_mean, masked_whiten
from lightning_rlhf.modules.base import RLHFLightningModule
from lightning_rlhf.modules.batching import MicroBatch
from lightning_rlhf.modules.critic import Critic, build_critic
from lightning_rlhf.modules.losses import value_loss
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.numbers import PositiveFloat
from lightning_rlhf.modules.score_head import check_same_vocabulary
from lightning_rlhf.modules.settings import CriticSettings, ModelSettings
from lightning_rlhf.types import Experience


class PPOLightningModule(RLHFLightningModule):
    """PPO (Schulman et al. 2017, arXiv:1707.06347): actor, critic and, with ``kl``, a frozen reference.

    Args:
        critic: local folder or hub id that the critic starts from, of the policy's vocabulary; default the policy's. Of a
            reward model (one label) the score head is taken over, too; of a language model values start at 0. Of another model
            ``config_overrides`` do not count, and with ``lora`` all of its linear layers have an adapter.
        critic_lr: learning rate of the critic.
        critic_warmup: iterations at the start in which only the critic is trained.
        gamma: discount per token.
        lam: GAE's weight of longer returns.
        value_clip: how far values may move per rollout before their gradient ends; null switches it off.
        whiten_advantages: to mean 0 and variance 1 over the iteration's tokens.
        whiten_rewards: scale the token rewards to variance 1 over the iteration (their mean stays).
        **kwargs: see `RLHFLightningModule`.
    """

    default_advantage = "gae"
    advantage_inputs = RLHFLightningModule.advantage_inputs | {"values", "gamma", "lam", "whiten"}

    def __init__(
        self,
        model: str,
        critic: str | None = None,
        critic_lr: PositiveFloat = 1e-5,
        critic_warmup: NonNegativeInt = 0,
        gamma: ClosedUnitInterval = 1.0,
        lam: ClosedUnitInterval = 1.0,
        value_clip: PositiveFloat | None = 0.5,
        whiten_advantages: bool = True,
        whiten_rewards: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.critic_model, self.critic_lr, self.critic_warmup = critic or model, critic_lr, critic_warmup
        self.gamma, self.lam, self.value_clip = gamma, lam, value_clip
        self.whiten_advantages, self.whiten_rewards = whiten_advantages, whiten_rewards
        self.critic: Critic = None  # type: ignore[assignment]

    def _check_estimator(self) -> None:
        super()._check_estimator()
        if "values" not in self.estimator_takes:
            raise ValueError(
                f"model.advantage: {self.advantage_function.__name__} takes no values, the critic would be trained for"
                " nothing: use class_path: lightning_rlhf.GRPOLightningModule, or gae"
            )

    @property
    def roles(self) -> dict[str, ModelSettings]:
        return super().roles | {"critic": self._critic_settings}

    @cached_property
    def _critic_settings(self) -> ModelSettings:
        own = self.settings
        if self.critic_model == own.model:
            return own
        # what was said of the policy's config and layers does not hold for another model
        everywhere = own.lora and replace(own.lora, target_modules="all-linear", modules_to_save=None, adapter=None)
        other = {"model": self.critic_model, "config_overrides": None, "lora": everywhere}
        return CriticSettings(**{field.name: getattr(own, field.name) for field in fields(own)} | other)

    def check_models(self) -> int:
        if self.critic_model != self.settings.model:
            check_same_vocabulary(self.roles["critic"], self.settings)
        return super().check_models()

    @property
    def learning_rates(self) -> dict[str, float]:
        return super().learning_rates | {"critic": self.critic_lr}

    def configure_model(self) -> None:
        super().configure_model()
        if self.critic is None:
            self.critic = build_critic(self.roles["critic"], self.strategy, seed=self.seed)

    @property
    def trains_actor(self) -> bool:
        """Whether the critic's warm-up is over."""
        return self.trainer.fit_loop.total_batch_idx >= self.critic_warmup

    @property
    def flops(self) -> list[Passes]:
        actor = self.update_passes(self.actor) if self.trains_actor else []
        return actor + self.update_passes(self.critic, outputs=1)

    def evaluate(self, experience: Experience) -> Experience:
        experience = super().evaluate(experience)
        with self.phases("values"):
            return replace(experience, values=self.forward_all(self.critic, experience, self.critic))

    def compute_advantages(self, experience: Experience) -> tuple[Tensor, Tensor]:
        if self.whiten_rewards:
            rewards = experience.rewards
            mean = masked_mean(rewards, experience.mask)
            whitened = (masked_whiten(rewards, experience.mask) + mean) * experience.mask
            experience = replace(experience, rewards=whitened)
        return super().compute_advantages(experience)

    def estimator_inputs(self, experience: Experience) -> dict[str, Any]:
        own = {"values": experience.values, "gamma": self.gamma, "lam": self.lam, "whiten": self.whiten_advantages}
        return super().estimator_inputs(experience) | own

    def update(self, experience: Experience) -> Metrics:
        metrics = super().update(experience)
        metrics.mean("critic/explained_variance", explained_variance(experience))
        return metrics

    def micro_step(
        self, experience: Experience, batch: MicroBatch, weights: Float[Tensor, "b T"], metrics: Metrics, steps: int
    ) -> None:
        """The actor's pass, then the critic's: one graph at a time is held in memory."""
        if self.trains_actor:
            super().micro_step(experience, batch, weights, metrics, steps)
        rows, width = batch.rows, batch.width
        assert experience.values is not None
        assert experience.returns is not None
        old, returns, mask = (x[rows, :width] for x in (experience.values, experience.returns, experience.mask))
        token_losses, token_metrics = value_loss(self.critic(batch.packed), old, returns, mask, clip=self.value_clip)
        loss = (weights * token_losses).sum()
        self.manual_backward(loss * self.trainer.world_size)
        metrics.sum("critic/vf_loss", loss.detach() / steps)
        for name, value in token_metrics.items():
            metrics.mean(f"critic/{name}", value, weights)


def explained_variance(experience: Experience) -> Float[Tensor, ""]:
    """1 - Var(returns - values) / Var(returns) over the iteration's tokens: 1 is a perfect critic, 0 a constant one."""
    assert experience.values is not None
    assert experience.returns is not None
    taken = experience.mask > 0
    returns, errors = experience.returns[taken], (experience.returns - experience.values)[taken]
    return 1.0 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8) if taken.any() else torch.zeros(())
