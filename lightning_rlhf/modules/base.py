"""`RLHFLightningModule`: one iteration of reinforcement learning as a ``training_step``.

    score → gather the whole batch → log-probs (old, reference) → advantages
          → update (`policy_update`): for epoch, mini-batch, packed micro-batch: loss → backward;   clip → step

After the gather every rank holds the iteration's token ids and (G, T) tensors; the work on them is split by a packing plan that
all ranks compute alike. ``trainer.global_step`` counts iterations: only an iteration's last optimizer step is counted.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from jsonargparse.typing import OpenUnitInterval
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.modules import advantages
from lightning_rlhf.modules.correction import add_off_policy, importance_weights, kept, mean_weight
from lightning_rlhf.modules.experience import gather_experience
from lightning_rlhf.modules.functions import check_options, function_named
from lightning_rlhf.modules.kl import kl_estimate
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.policy_update import PolicyUpdateModule
from lightning_rlhf.modules.report import Alarms, add_completions, add_scores, constant_groups, finish
from lightning_rlhf.modules.scored import rollout_of
from lightning_rlhf.types import Experience, Rollout, Scores


class RLHFLightningModule(PolicyUpdateModule):
    """Group-based policy optimisation without a critic; the base of every algorithm.

    Override points, each one small method: `score`, `compute_advantages`, `policy_loss`, `configure_optimizers`.

    Args:
        model: local folder or hub id of the policy, or ``random:tiny``.
        advantage: estimator by name (see `modules.advantages`) or dotted path; default `default_advantage` of the class.
        advantage_args: options of the estimator, such as {gamma: 0.99}.
        mask_truncated: leave responses out that hit ``max_completion_length``.
        ema_decay: keep a moving average of the actor's weights in float32, which remembers some 1 / (1 - decay) iterations; for
            ``lightning-rlhf export --average``. null is none.
        **kwargs: see `PolicyUpdateModule`, `ScoredModule`, `TrainedModule` and `ModelSettings`.
    """

    # not a default of the argument: on the command line the arguments of one class are carried over to another
    default_advantage = "grpo"
    # what `estimator_inputs` has for the estimator
    advantage_inputs = frozenset(
        {"rewards", "mask", "groups", "baselines", "old_log_probs", "sum_pi_squared", "importance"}
        | {"parts", "part_weights"}
    )

    def __init__(
        self,
        model: str,
        advantage: str | None = None,
        advantage_args: dict[str, Any] | None = None,
        mask_truncated: bool = False,
        ema_decay: OpenUnitInterval | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.advantage_function = function_named(advantage or self.default_advantage, advantages, "model.advantage")
        self.advantage_args = advantage_args or {}
        self._check_estimator()
        self.mask_truncated, self.ema_decay = mask_truncated, ema_decay
        self.alarms = Alarms()
        # what callbacks add to an iteration's metrics, and what they may read of the last one
        self.extra_metrics: dict[str, float] = {}
        none = self.settings.lora is not None or not self.needs_reference
        if self.settings.offload_reference and none and self.frozen_reward is None:
            why = "model.kl.coef is 0" if not self.needs_reference else "model.lora is set"
            rank_zero_warn(f"model.offload_reference moves nothing: {why}, so no reference is loaded")
        self.last_experience: Experience

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
    def needs_greedy(self) -> bool:
        """Whether the estimator compares with the greedy response to each prompt."""
        return "baselines" in self.estimator_takes

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.kl.target is not None:
            checkpoint["kl_coef"] = self.kl_coef

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.kl.target is not None:
            self.kl_coef = checkpoint.get("kl_coef", self.kl_coef)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.extra_metrics = {}  # of an iteration that was interrupted

    # -- one iteration -----------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        rollout = rollout_of(batch)
        with self.phases("reward"):
            scores = batch["scores"] if "scores" in batch else self.scores_of(rollout)
            experience = self.gather(rollout, scores)
        same = constant_groups(experience)
        self.alarms.look_at_rewards(experience)
        experience = self.evaluate(experience)
        values, returns = checked_advantages(self.compute_advantages(experience), experience.mask)
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
        greedy = experience.baselines
        more: dict[str, Any] = {
            "baselines": greedy.clamp(*self.reward_clip) if greedy is not None and self.reward_clip else greedy,
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

    # -- scoring and evaluation --------------------------------------------------------------------

    def gather(self, rollout: Rollout, scores: Scores) -> Experience:
        """The whole iteration, on this rank's device."""
        gathered = gather_experience(
            rollout,
            scores,
            self.strategy.all_gather_objects_dp,
            baselines=None if rollout.greedy is None else self.greedy_scores(rollout.greedy),
            mask_truncated=self.mask_truncated,
            reward_clip=self.reward_clip,
            judge=self.val_metric,
            data_rank=self.strategy.dp_rank,
        )
        return gathered.to(self.device, non_blocking=True)

    def greedy_scores(self, greedy: Rollout) -> Tensor:
        """One per prompt; NaN where the engine aborted the response."""
        total = self.scores_of(greedy).total
        aborted = torch.tensor([c.finish_reason == "abort" for c in greedy.completions], dtype=torch.bool)
        return total.masked_fill(aborted.to(total.device), math.nan)

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
            with self.phases("reference"), self.as_reference() as root:
                ref = self.forward_all(root, experience, lambda packed: root(packed, temperature)[0])
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


def checked_advantages(found: Any, mask: Float[Tensor, "G T"]) -> tuple[Tensor, Tensor]:
    """What an estimator, or a `compute_advantages` of one's own, gave; gradients of a baseline are not followed.

    Raises:
        ValueError: it is not one advantage, and one return, per token.
    """
    pair = found if isinstance(found, tuple) and len(found) == 2 else (found,)
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in pair]
    if shapes != [tuple(mask.shape)] * 2:
        got = " and ".join(map(str, shapes))
        raise ValueError(
            "model.advantage, or compute_advantages, must give (advantages, returns), both of the shape of experience.mask"
            f" {tuple(mask.shape)}, got {got}"
        )
    advantages, returns = found
    return advantages.detach(), returns.detach()
