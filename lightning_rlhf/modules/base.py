"""`RLHFLightningModule`: one iteration of reinforcement learning as a ``training_step``.

    score → gather the whole batch → log-probs (old, reference) → advantages
          → for epoch, mini-batch, packed micro-batch: loss → backward;   clip → step

After the gather every rank holds the iteration's token ids and (G, T) tensors; the work on them is split by a packing plan that
all ranks compute alike. The loss of a micro-batch is W · Σ w_t · l_t on any rank, with w_t the token's share in the GLOBAL
optimizer step and W the ranks that FSDP averages over, so results depend neither on the number of ranks nor on micro-batches.
``trainer.global_step`` counts iterations: only an iteration's last optimizer step is counted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from jsonargparse.typing import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_rlhf.flops import Passes
from lightning_rlhf.modules import advantages, losses
from lightning_rlhf.modules.aggregation import Aggregation, token_weights, weighted
from lightning_rlhf.modules.batching import MicroBatch, micro_batches, mini_batches
from lightning_rlhf.modules.correction import Correction, add_off_policy, importance_weights, kept, mean_weight
from lightning_rlhf.modules.critic import Critic
from lightning_rlhf.modules.experience import gather_experience
from lightning_rlhf.modules.functions import check_options, function_named
from lightning_rlhf.modules.kl import KL, kl_estimate
from lightning_rlhf.modules.losses import OWN_AGGREGATION, SELECTIONS
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.policy import Policy
from lightning_rlhf.modules.report import (
    Alarms,
    add_completions,
    add_importance,
    add_mismatch,
    add_scores,
    constant_groups,
    finish,
)
from lightning_rlhf.modules.scored import ScoredModule
from lightning_rlhf.modules.training import passes_of
from lightning_rlhf.packing import Packed
from lightning_rlhf.types import Experience, Rollout, Scores, derive_seed


class RLHFLightningModule(ScoredModule):
    """Group-based policy optimisation without a critic; the base of every algorithm.

    Override points, each one small method: `score`, `compute_advantages`, `policy_loss`, `configure_optimizers`.

    Args:
        model: local folder or hub id of the policy, or ``random:tiny``.
        advantage: estimator by name (see `modules.advantages`) or dotted path; default `default_advantage` of the class.
        advantage_args: options of the estimator, such as {gamma: 0.99}.
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
        mask_truncated: leave responses out that hit ``max_completion_length``.
        ppo_epochs: passes over a rollout.
        mini_batches: optimizer steps per pass.
        target_kl: bound of KL(old policy, policy) in nats per token, a mean over the tokens of an optimizer step before it is
            taken: beyond it, this step and the remaining ones of the iteration are left out; null is no bound.
        positive_coef: weight of the negative log-likelihood of right responses, a mean over their tokens (VAPO, Yue et al. 2025,
            arXiv:2504.05118, which takes 0.1); right is a reward of at least ``val_success``.
        ema_decay: keep a moving average of the actor's weights in float32, which remembers some 1 / (1 - decay) iterations; for
            ``lightning-rlhf export --average``. null is none.
        **kwargs: see `ScoredModule`, `TrainedModule` and `ModelSettings`.
    """

    # not a default of the argument: on the command line the arguments of one class are carried over to another
    default_advantage = "grpo"
    # what `estimator_inputs` has for the estimator
    advantage_inputs = frozenset(
        {
            "rewards",
            "mask",
            "groups",
            "baselines",
            "old_log_probs",
            "sum_pi_squared",
            "importance",
            "parts",
            "part_weights",
        }
    )

    def __init__(
        self,
        model: str,
        advantage: str | None = None,
        advantage_args: dict[str, Any] | None = None,
        loss: str = "ppo",
        loss_args: dict[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        clip_low: NonNegativeFloat | None = None,
        clip_high: NonNegativeFloat | None = None,
        clip_dual: float | None = 3.0,
        entropy_coef: NonNegativeFloat = 0.0,
        kl: KL = KL(),
        correction: Correction | None = None,
        mask_truncated: bool = False,
        ppo_epochs: PositiveInt = 1,
        mini_batches: PositiveInt = 1,
        target_kl: PositiveFloat | None = None,
        positive_coef: NonNegativeFloat = 0.0,
        ema_decay: OpenUnitInterval | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.advantage_function = function_named(advantage or self.default_advantage, advantages, "model.advantage")
        self.advantage_args = advantage_args or {}
        self.kl, self.kl_coef = kl, kl.coef
        self._check_estimator()
        self.loss_function = function_named(loss, losses, "model.loss")
        self.select_function = SELECTIONS.get(self.loss_function)
        clips = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
        check_options(self.loss_function, loss_args or {}, {*clips, *_TENSORS}, "model.loss_args")
        given = {name: clip for name, clip in clips.items() if clip is not None or name == "clip_dual"}
        self.loss_args = given | (loss_args or {})
        self.aggregation: Aggregation = aggregation or OWN_AGGREGATION.get(self.loss_function, "token-mean")
        self.mask_truncated, self.entropy_coef, self.correction = mask_truncated, entropy_coef, correction
        self.ppo_epochs, self.mini_batches = ppo_epochs, mini_batches
        self.target_kl, self.positive_coef, self.ema_decay = target_kl, positive_coef, ema_decay
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
        if clip_dual is not None and clip_dual <= 1.0:
            raise ValueError(f"model.clip_dual must be above 1, or null to switch it off, got {clip_dual}")
        self.alarms = Alarms()
        # what callbacks add to an iteration's metrics, and what they may read of the last one
        self.extra_metrics: dict[str, float] = {}
        none = self.settings.lora is not None or not self.needs_reference
        if self.settings.offload_reference and none and self.frozen_reward is None:
            why = "model.kl.coef is 0" if not self.needs_reference else "model.lora is set"
            rank_zero_warn(f"model.offload_reference moves nothing: {why}, so no reference is loaded")
        self.last_experience: Experience
        self._moved: Metrics

    def _check_estimator(self) -> None:
        """Raise ValueError if the estimator needs what this class does not have."""
        parameters = inspect.signature(self.advantage_function).parameters.values()
        self.estimator_takes = frozenset(p.name for p in parameters)
        needed = {
            p.name for p in parameters if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
        check_options(self.advantage_function, self.advantage_args, self.advantage_inputs, "model.advantage_args")
        if missing := needed - self.advantage_inputs - self.advantage_args.keys():
            raise ValueError(
                f"model.advantage: {self.advantage_function.__name__} needs {', '.join(sorted(missing))}, which"
                f" {type(self).__name__} does not have: take another one, or hand it over in compute_advantages"
            )
        if "parts" in needed and (self.reward_clip or (self.kl.where == "reward" and self.kl.coef)):
            raise ValueError(
                f"model.advantage: {self.advantage_function.__name__} takes the reward functions one by one, not their sum:"
                " leave out model.reward_clip, and set model.kl.where to loss"
            )

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0.0

    @property
    def refresh_every(self) -> int | None:
        return self.kl.refresh_every

    @property
    def needs_greedy(self) -> bool:
        """Whether the estimator compares with the greedy response to each prompt."""
        return "baselines" in self.estimator_takes

    @cached_property
    def flops(self) -> list[Passes]:
        """What one iteration's update is worth; empty for a model whose FLOPs are not known."""
        return self.update_passes(self.actor)

    def update_passes(self, root: Policy | Critic, outputs: int | None = None) -> list[Passes]:
        """Forward and backward of one role in every epoch."""
        return passes_of(root, outputs, self.ppo_epochs, self.ppo_epochs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.kl.target is not None:
            checkpoint["kl_coef"] = self.kl_coef

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.kl.target is not None:
            self.kl_coef = checkpoint.get("kl_coef", self.kl_coef)

    # -- one iteration -----------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        rollout: Rollout = batch["rollout"]
        with self.phases("reward"):
            scores = batch["scores"] if "scores" in batch else self.scores_of(rollout)
            experience = self.gather(rollout, scores)
        same = constant_groups(experience)
        experience = self.evaluate(experience)
        values, returns = self.compute_advantages(experience)
        experience = replace(experience, advantages=values, returns=returns)
        sampled = experience.mask
        experience = self.correct(experience)
        with self.phases("update"):
            metrics = self.update(experience)
            self.follow_actor()
        metrics.mean("reward/frac_zero_std", same)
        if experience.baselines is not None:
            metrics.mean("reward/greedy_mean", experience.baselines, experience.baselines.isfinite())
        if experience.importance is not None:
            metrics.mean("rollout/rejected_ratio", 1.0 - experience.mask.sum() / sampled.sum().clamp(min=1.0))
            add_off_policy(metrics, experience.old_log_probs, experience.sampler_log_probs, sampled)
        self.last_experience, self.last_scores = experience, scores
        self.log_iteration(rollout, experience, metrics)

    def compute_advantages(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """(advantages, returns), each (G, T), from the whole batch. Runs equally on every rank."""
        return self.advantage_function(**self.estimator_inputs(experience), **self.advantage_args)

    def estimator_inputs(self, experience: Experience) -> dict[str, Any]:
        """`advantage_inputs`: what every estimator gets, and of the rest what it lists."""
        old, sampler, mask = experience.old_log_probs, experience.sampler_log_probs, experience.mask
        inputs: dict[str, Any] = {"rewards": experience.rewards, "mask": mask, "groups": experience.group}
        more: dict[str, Any] = {
            "baselines": experience.baselines,
            "parts": experience.parts,
            "part_weights": self.part_weights,
            "old_log_probs": old,
            "sum_pi_squared": experience.sum_pi_squared,
        }
        if "importance" in self.estimator_takes and self.correction is not None:
            assert old is not None
            assert sampler is not None
            more["importance"] = importance_weights(old, sampler, mask, self.correction)
        return inputs | {name: value for name, value in more.items() if name in self.estimator_takes}

    def policy_loss(
        self, log_probs: Tensor, old_log_probs: Tensor, token_advantages: Tensor, mask: Tensor, **selected: Tensor
    ) -> tuple[Float[Tensor, "b T"], dict[str, Tensor]]:
        """(token losses, metrics) of one micro-batch; weights and sums come after.

        Args:
            **selected: ``chosen``, what `losses.SELECTIONS` has found in the whole optimizer step, if the loss is one of them.
        """
        return self.loss_function(log_probs, old_log_probs, token_advantages, mask, **self.loss_args, **selected)

    # -- scoring and evaluation --------------------------------------------------------------------

    def gather(self, rollout: Rollout, scores: Scores) -> Experience:
        """The whole iteration, on this rank's device."""
        gathered = gather_experience(
            rollout,
            scores,
            self.strategy.all_gather_objects_dp,
            baselines=None if rollout.greedy is None else self.scores_of(rollout.greedy).total,
            mask_truncated=self.mask_truncated,
            reward_clip=self.reward_clip,
            data_rank=self.strategy.dp_rank,
        )
        return gathered.to(self.device, non_blocking=True)

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether they cost a pass of their own: with one optimizer step per rollout the update's own forward has them."""
        return (
            self.ppo_epochs * self.mini_batches > 1
            or (self.needs_reference and self.kl.where == "reward")
            or self.select_function is not None
            or (self.correction is not None and self.correction.needs_batch)
            or not self.estimator_takes.isdisjoint({"old_log_probs", "sum_pi_squared", "importance"})
        )

    def evaluate(self, experience: Experience) -> Experience:
        """Add what is computed before the update without gradients; KL in the reward is taken off here."""
        temperature = experience.temperature
        if self.needs_old_log_probs:
            squares = "sum_pi_squared" in self.estimator_takes
            with self.phases("log_prob"):
                found = self.forward_all(
                    self.actor,
                    experience,
                    lambda packed: torch.stack(self.actor(packed, temperature, with_squares=squares)[::2]),
                    outputs=1 + squares,
                )
            experience = replace(experience, old_log_probs=found[0], sum_pi_squared=found[1] if squares else None)
        if self.needs_reference:
            with self.phases("reference"):
                ref = self.reference_log_probs(experience)
            experience = replace(experience, ref_log_probs=ref)
            if self.kl.where == "reward":
                assert experience.old_log_probs is not None
                distance = kl_estimate(experience.old_log_probs, ref, self.kl.estimator) * experience.mask
                experience = replace(experience, rewards=experience.rewards - self.kl_coef * distance)
        return experience

    def correct(self, experience: Experience) -> Experience:
        """What of a rollout correction depends on the whole iteration: its mean weight, and the tokens that no longer count.

        After the advantages, in which rejected responses still are part of their group.
        """
        correction, sampler = self.correction, experience.sampler_log_probs
        if correction is None:
            return experience
        if sampler is None:
            raise RuntimeError("model.correction needs the engine's log-probs, and the rollout has none")
        if not correction.needs_batch:
            return experience
        old, mask = experience.old_log_probs, experience.mask
        assert old is not None
        weights = importance_weights(old, sampler, mask, correction)
        mean = float(mean_weight(weights, mask, correction)) if correction.normalize else 1.0
        return replace(experience, importance=weights, importance_mean=mean, mask=kept(old, sampler, mask, correction))

    def reference_log_probs(self, experience: Experience) -> Float[Tensor, "G T"]:
        """Of the frozen reference; with LoRA that is the actor without its adapter."""
        root, adapter = self.reference or self.actor, self.actor.adapter
        with nullcontext() if adapter is None else adapter.disabled():
            return self.forward_all(root, experience, lambda packed: root(packed, experience.temperature)[0])

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

    # -- the update --------------------------------------------------------------------------------

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
                self.optimizers().zero_grad()  # type: ignore[union-attr]
            last = too_far or number == len(steps)
            self.step_optimizer(Metrics(self.device) if too_far else metrics, last)
            if last:
                break
        if self.target_kl is not None:
            metrics.mean("actor/kl_skipped_steps", len(steps) - number + too_far)
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
            steps: optimizer steps of the iteration (losses are logged as their mean).
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
        token_losses, token_metrics = self.policy_loss(
            log_probs, old, experience.advantages[rows, :width], mask, **selected
        )
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
        self.manual_backward(loss * self.trainer.world_size)
        if with_entropy:
            metrics.mean("actor/entropy", entropy.detach(), weights)
        for name, value in token_metrics.items():
            metrics.mean(f"actor/{name}", value, weights)
        if sampler is not None:
            add_mismatch(metrics, old, sampler, mask)

    # -- metrics -----------------------------------------------------------------------------------

    def log_iteration(self, rollout: Rollout, experience: Experience, metrics: Metrics) -> None:
        """All of the iteration's metrics in one reduction; equal on every rank, so that nothing else is synchronised."""
        names = self.strategy.all_gather_objects_dp(list(self.last_scores.metrics))
        add_scores(metrics, self.last_scores, sorted({name for rank in names for name in rank}))
        add_completions(metrics, rollout)
        reduced = finish(metrics.reduce(self.strategy.all_reduce_dp))
        reduced |= self.extra_metrics
        self.extra_metrics = {}
        if self.kl.target is not None:
            reduced["actor/kl_coef"] = self.kl_coef
            if math.isfinite(distance := reduced.get("actor/kl", math.nan)):
                self.kl_coef = self.kl.adapted(self.kl_coef, distance, len(experience))
        self.log_reduced(reduced, len(experience))
        self.log("reward", reduced["reward/mean"], prog_bar=True, logger=False, batch_size=len(experience))
        self.alarms(reduced, rollout.sampling)


_TENSORS = frozenset({"log_probs", "old_log_probs", "advantages", "mask", "chosen"})
"""Arguments of a loss that are no options."""
