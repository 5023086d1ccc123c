"""`PolicyUpdateModule`: how an iteration becomes optimizer steps of the actor.

    for epoch, mini-batch:  weights of all its tokens ─▶ packed micro-batches: loss, backward ─▶ clip, step

The loss of a micro-batch is W · Σ w_t · l_t on any rank, with w_t the token's share in the GLOBAL optimizer step and W the ranks
that FSDP averages over, so results depend neither on the number of ranks nor on micro-batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from lightning_rlhf.flops import Passes
from lightning_rlhf.modules import losses
from lightning_rlhf.modules.aggregation import Aggregation, token_weights, weighted
from lightning_rlhf.modules.batching import MicroBatch, micro_batches, mini_batches
from lightning_rlhf.modules.correction import Correction, add_off_policy, importance_weights
from lightning_rlhf.modules.critic import Critic
from lightning_rlhf.modules.functions import check_options, function_named
from lightning_rlhf.modules.kl import KL, kl_estimate
from lightning_rlhf.modules.losses import OWN_AGGREGATION, SELECTIONS
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.numbers import NonNegativeFloat, PositiveFloat
from lightning_rlhf.modules.policy import Policy
from lightning_rlhf.modules.report import add_importance, add_mismatch
from lightning_rlhf.modules.scored import ScoredModule
from lightning_rlhf.modules.training import passes_of
from lightning_rlhf.options import optional_options, options_as
from lightning_rlhf.packing import Packed
from lightning_rlhf.types import Experience, derive_seed

_TENSORS = frozenset({"log_probs", "old_log_probs", "advantages", "mask", "chosen"})
"""Arguments of a loss that are no options."""

_RESERVED = {"grad_norm", "lr", "skipped_steps", "pg_loss", "positive_loss", "entropy"}
_RESERVED |= {"kl", "kl_coef", "kl_loss", "kl_skipped_steps"}
"""Metrics of the actor that a loss must not give, too: they would be mixed."""


class PolicyUpdateModule(ScoredModule):
    """The actor's losses. Override point: `policy_loss`.

    Args:
        model: see `TrainedModule`.
        loss: policy loss by name (see `modules.losses`) or dotted path.
        loss_args: options of the loss, such as {beta: 0.5}.
        aggregation: how token losses become one loss, over the global optimizer step; null is the loss's own: seq-mean-token-mean
            for gspo, gmpo and sapo, token-mean for all others.
        clip_low: how far the policy may move against a token: what is bounded is the loss's matter, for ppo the ratio, by
            1 - clip_low. null is the loss's own: 0.2 for ppo.
        clip_high: the same in favour of a token, for ppo by 1 + clip_high.
        clip_dual: bound of the loss at negative advantages, in units of the advantage; null switches it off.
        entropy_coef: weight of the entropy bonus.
        kl: distance to the frozen reference.
        correction: importance weights for responses that another policy drew, the engine's roundings included; the engine then
            returns log-probs in every iteration. ``{}`` takes its defaults; null is none.
        ppo_epochs: passes over a rollout.
        mini_batches: optimizer steps per pass.
        target_kl: bound of KL(old policy, policy) in nats per token, a mean over the tokens of an optimizer step before it is
            taken: beyond it, this step and the remaining ones of the iteration are left out; null is no bound.
        positive_coef: weight of the negative log-likelihood of right responses, a mean over their tokens (VAPO, Yue et al. 2025,
            arXiv:2504.05118, which takes 0.1); right is a reward (or that of ``val_metric``) of at least ``val_success``.
        **kwargs: see `ScoredModule`.

    Attributes:
        made: share of the last iteration's passes that were made, below 1 where ``target_kl`` ended it.
    """

    def __init__(
        self,
        model: str,
        loss: str = "ppo",
        loss_args: dict[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        clip_low: NonNegativeFloat | None = None,
        clip_high: NonNegativeFloat | None = None,
        clip_dual: float | None = 3.0,
        entropy_coef: NonNegativeFloat = 0.0,
        kl: KL = KL(),
        correction: Correction | None = None,
        ppo_epochs: PositiveInt = 1,
        mini_batches: PositiveInt = 1,
        target_kl: PositiveFloat | None = None,
        positive_coef: NonNegativeFloat = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        kl = options_as(KL, kl, "model.kl")
        correction = optional_options(Correction, correction, "model.correction")
        self.kl, self.kl_coef = kl, kl.coef
        self.loss_function = function_named(loss, losses, "model.loss")
        self.select_function = SELECTIONS.get(self.loss_function)
        clips = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
        check_options(self.loss_function, loss_args or {}, {*clips, *_TENSORS}, "model.loss_args")
        for name in ("clip_low", "clip_high"):
            if clips[name] is not None and name not in inspect.signature(self.loss_function).parameters:
                raise ValueError(f"model.{name}: {self.loss_function.__name__} has no such bound, leave it out")
        given = {name: clip for name, clip in clips.items() if clip is not None or name == "clip_dual"}
        self.loss_args = given | (loss_args or {})
        self._check_loss()
        self.aggregation: Aggregation = aggregation or OWN_AGGREGATION.get(self.loss_function, "token-mean")
        self.entropy_coef, self.correction = entropy_coef, correction
        self.ppo_epochs, self.mini_batches = ppo_epochs, mini_batches
        self.target_kl, self.positive_coef = target_kl, positive_coef
        if target_kl is not None and ppo_epochs * mini_batches == 1:
            raise ValueError(
                "model.target_kl ends an iteration of several optimizer steps, there is one: set model.mini_batches or"
                " model.ppo_epochs, or leave it out"
            )
        if kl.refresh_every is not None and self.settings.lora is not None:
            raise ValueError(
                "model.kl.refresh_every: with model.lora the reference is the base without its adapter, which does not change:"
                " leave out one of them"
            )
        if clip_dual is not None and not 1.0 < clip_dual < math.inf:
            raise ValueError(f"model.clip_dual must be above 1 and finite, or null to switch it off, got {clip_dual}")
        self.made = 1.0
        self._moved: Metrics

    def _check_loss(self) -> None:
        """Raise ValueError if the function cannot be called as `policy_loss` does."""
        if type(self).policy_loss is not PolicyUpdateModule.policy_loss:
            return
        given = ("log_probs", "old_log_probs", "advantages", "mask")
        try:
            inspect.signature(self.loss_function).bind(*given, **self.loss_args)
        except TypeError as error:
            raise ValueError(
                f"{self.loss_name} is called with ({', '.join(given)}), in this order, and its options by name: {error}; what"
                " else it needs is for a policy_loss of your own in a subclass"
            ) from None

    @property
    def loss_name(self) -> str:
        """As errors call it."""
        if type(self).policy_loss is PolicyUpdateModule.policy_loss:
            return f"model.loss: {self.loss_function.__name__}"
        return f"{type(self).__name__}.policy_loss"

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0.0

    @property
    def refresh_every(self) -> int | None:
        return self.kl.refresh_every

    @property
    def flops(self) -> list[Passes]:
        """What the last iteration's update is worth; empty for a model whose FLOPs are not known."""
        return self.update_passes(self.actor)

    def update_passes(self, root: Policy | Critic, outputs: int | None = None) -> list[Passes]:
        """Forward and backward of one role in every epoch, as far as it got."""
        epochs = self.ppo_epochs * self.made
        return passes_of(root, outputs, epochs, epochs)

    def policy_loss(
        self, log_probs: Tensor, old_log_probs: Tensor, token_advantages: Tensor, mask: Tensor, **selected: Tensor
    ) -> tuple[Float[Tensor, "b T"], dict[str, Tensor]]:
        """(token losses, metrics) of one micro-batch; weights and sums come after.

        Args:
            **selected: ``chosen``, what `losses.SELECTIONS` has found in the whole optimizer step, if the loss is one of them.
        """
        return self.loss_function(log_probs, old_log_probs, token_advantages, mask, **self.loss_args, **selected)

    def update(self, experience: Experience) -> Metrics:
        """``ppo_epochs`` x ``mini_batches`` optimizer steps; the last one advances ``trainer.global_step``."""
        metrics, self._moved = Metrics(self.device), Metrics(self.device)
        self.packing = {"real_tokens": 0, "padded_tokens": 0}
        self.lengths = [len(sequence) for sequence in experience.sequences]
        iteration, responses = self.trainer.fit_loop.total_batch_idx, len(experience)
        steps = [
            rows
            for epoch in range(self.ppo_epochs)
            for rows in mini_batches(responses, self.mini_batches, self.seed, iteration, epoch)
        ]
        for number, rows in enumerate(steps, 1):
            weights, chosen = torch.zeros_like(experience.mask), torch.tensor(rows, device=self.device)
            weights[chosen] = token_weights(experience.mask[chosen], self.aggregation, experience.max_length)
            experience = self.select(experience, rows, number)
            experience = self.weigh_positive(experience, chosen)
            batches, spent = micro_batches(experience, rows, self.split)
            self.packing["real_tokens"] += sum(len(experience.sequences[i]) for i in rows)
            self.packing["padded_tokens"] += spent
            for batch in batches:
                self.micro_step(experience, batch, weights[batch.rows, : batch.width], metrics, len(steps))
            if too_far := self.moved_too_far():
                self.one_optimizer().zero_grad()
            last = too_far or number == len(steps)
            self.step_optimizer(Metrics(self.device) if too_far else metrics, last)
            if last:
                break
        if self.target_kl is not None:
            metrics.mean("actor/kl_skipped_steps", len(steps) - number + too_far)
            metrics.scale(("actor/pg_loss", "actor/positive_loss", "critic/vf_loss"), len(steps) / number)
        self.made = number / len(steps)
        self.step_schedulers()
        return metrics

    def select(self, experience: Experience, rows: Sequence[int], number: int) -> Experience:
        """Add the tokens that the loss treats differently, chosen from the whole optimizer step by the policy it begins with.

        Args:
            rows: responses of the step.
            number: of the step, from 1: in the first one the policy is still the old one.
        """
        if self.select_function is None:
            return experience
        old = experience.old_log_probs
        assert old is not None
        assert experience.advantages is not None
        log_probs = old
        if number > 1:
            log_probs = self.forward_all(
                self.actor, experience, lambda packed: self.actor(packed, experience.temperature)[0], rows
            )
        here = torch.tensor(rows, device=self.device)
        tensors = (x[here] for x in (log_probs, old, experience.advantages, experience.mask))
        seed = derive_seed("select", self.seed, self.trainer.fit_loop.total_batch_idx, number)
        chosen = torch.zeros_like(experience.mask, dtype=torch.bool)
        listed = inspect.signature(self.select_function).parameters
        options = {name: value for name, value in (self.loss_args | {"seed": seed}).items() if name in listed}
        chosen[here] = self.select_function(*tensors, **options)
        return replace(experience, chosen=chosen)

    def weigh_positive(self, experience: Experience, rows: Tensor) -> Experience:
        """Add the shares of the tokens in the likelihood of the step's right responses, those of ``rows``."""
        if not self.positive_coef:
            return experience
        assert experience.scores is not None
        positive, right = torch.zeros_like(experience.mask), experience.scores[rows] >= self.val_success
        positive[rows] = token_weights(experience.mask[rows] * right[:, None], "token-mean")
        return replace(experience, positive=positive)

    def moved_too_far(self) -> bool:
        """Whether KL(old policy, policy) of an optimizer step's tokens is beyond ``target_kl``; equal on every rank."""
        if self.target_kl is None:
            return False
        distance = self._moved.reduce(self.strategy.all_reduce_dp).get("kl", 0.0)
        self._moved = Metrics(self.device)
        return bool(self.strategy.broadcast_object_sp(distance) > self.target_kl)

    def micro_step(
        self, experience: Experience, batch: MicroBatch, weights: Float[Tensor, "b T"], metrics: Metrics, steps: int
    ) -> None:
        """Forward and backward of the actor on one micro-batch.

        Args:
            weights: each token's share in the global optimizer step.
            steps: optimizer steps that the iteration may have (losses are logged as the mean of those that it has).
        """
        rows, width = batch.rows, batch.width
        mask = experience.mask[rows, :width]
        with_entropy = self.entropy_coef > 0.0 or self.is_logging_iteration
        log_probs, entropy = self.actor(batch.packed, experience.temperature, with_entropy)
        old = log_probs.detach() if experience.old_log_probs is None else experience.old_log_probs[rows, :width]
        if self.target_kl is not None:
            self._moved.mean("kl", kl_estimate(old, log_probs.detach(), "k3"), mask)
        assert experience.advantages is not None
        selected = {} if experience.chosen is None else {"chosen": experience.chosen[rows, :width]}
        found = self.policy_loss(log_probs, old, experience.advantages[rows, :width], mask, **selected)
        token_losses, token_metrics = checked_loss(found, mask, self.loss_name)
        sampler = None if experience.sampler_log_probs is None else experience.sampler_log_probs[rows, :width]
        if self.correction is not None:
            assert sampler is not None
            if experience.importance is None:
                importance = importance_weights(old, sampler, mask, self.correction)
                add_off_policy(metrics, old, sampler, mask)
            else:
                importance = experience.importance[rows, :width]
            token_losses = token_losses * (importance / experience.importance_mean)
            add_importance(metrics, importance, weights * sampler.isfinite(), self.correction.cap)
        loss = weighted(weights, token_losses)
        metrics.sum("actor/pg_loss", loss.detach() / steps)
        if self.entropy_coef > 0.0:
            loss = loss - self.entropy_coef * weighted(weights, entropy)
        if experience.positive is not None:
            surprise = weighted(experience.positive[rows, :width], -log_probs)
            metrics.sum("actor/positive_loss", surprise.detach() / steps)
            loss = loss + self.positive_coef * surprise
        if experience.ref_log_probs is not None:
            distance = kl_estimate(log_probs, experience.ref_log_probs[rows, :width], self.kl.estimator)
            metrics.mean("actor/kl_loss", distance.detach(), weights)
            if self.kl.target is not None:
                lengths = mask.sum(1)
                per_response = torch.where(mask > 0, distance.detach(), 0).sum(1) / lengths.clamp(min=1)
                metrics.mean("actor/kl", per_response, lengths > 0)
            if self.kl.where == "loss":
                loss = loss + self.kl_coef * weighted(weights, distance)
        if not loss.requires_grad:
            raise ValueError(
                f"{self.loss_name} gave losses without a gradient: compute them from log_probs, not detached and not within"
                " torch.no_grad(); old_log_probs and advantages have none"
            )
        self.manual_backward(loss * self.trainer.world_size)
        if with_entropy:
            metrics.mean("actor/entropy", entropy.detach(), weights)
        for name, value in token_metrics.items():
            metrics.mean(f"actor/{name}", value, weights)
        if sampler is not None:
            add_mismatch(metrics, old, sampler, mask)

    @torch.no_grad()
    def forward_all(
        self,
        root: nn.Module,
        experience: Experience,
        forward: Callable[[Packed], Float[Tensor, "b T"]],
        rows: Sequence[int] | None = None,
        outputs: int | None = None,
    ) -> Tensor:
        """``forward`` over ``rows`` or the whole batch, each data rank its bins, the result equal on every rank: (G, T).

        Args:
            outputs: so many are stacked in what ``forward`` returns, and in the result, before the other dimensions.
        """
        shape = experience.mask.shape
        out = experience.mask.new_zeros(shape if outputs is None else (outputs, *shape))
        for batch in micro_batches(experience, range(len(experience)) if rows is None else rows, self.split)[0]:
            out[..., batch.rows, : batch.width] = forward(batch.packed)
        self.strategy.reshard(root)
        return self.strategy.all_reduce_dp(out)


def checked_loss(found: Any, mask: Float[Tensor, "b T"], name: str) -> tuple[Float[Tensor, "b T"], dict[str, Tensor]]:
    """What a policy loss gave.

    Args:
        name: of the loss, for the error.

    Raises:
        ValueError: it is not one loss per token, and metrics under names of their own: of tokens, of responses (b, 1), or one
            number.
    """
    pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(pair[0], Tensor) or pair[0].shape != mask.shape or not isinstance(pair[1], dict):
        got = tuple(pair[0].shape) if isinstance(pair[0], Tensor) else type(pair[0]).__name__
        metrics = "" if isinstance(pair[1], dict) else " without metrics"
        raise ValueError(
            f"{name} must give (losses of the tokens {tuple(mask.shape)}, a dict of metrics), got {got}{metrics}"
        )
    for metric, value in pair[1].items():
        if metric in _RESERVED:
            raise ValueError(
                f"{name} must not give the metric {metric}: actor/{metric} is one of the trainer's, rename it"
            )
        shape = tuple(getattr(value, "shape", ()))
        if shape not in ((), (len(mask), 1), tuple(mask.shape)):
            raise ValueError(
                f"{name}: the metric {metric} must have the shape {tuple(mask.shape)}, a value of each token, or be one number,"
                f" got {shape}"
            )
    return pair  # type: ignore[return-value]
