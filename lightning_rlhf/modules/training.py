"""`TrainedModule`: packed micro-batches, one optimizer over all roles, steps that a bad gradient cannot spoil.

``training_step`` of a subclass calls ``manual_backward`` for each micro-batch of an optimizer step, then `step_optimizer`;
``trainer.global_step`` counts its calls with ``last=True``.
"""

from __future__ import annotations

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import do_nothing_closure

from lightning_rlhf.modules.batching import Split
from lightning_rlhf.modules.gradients import clip_roles
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.roles import ModelRoles
from lightning_rlhf.modules.schedules import Schedule, warmup_schedule
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import attention_cost


class TrainedModule(ModelRoles):
    """How roles are trained, whatever the loss.

    Args:
        model: local folder or hub id of the policy, or ``random:tiny``.
        micro_batch_tokens: token budget of one forward and backward pass on one GPU; must hold the longest sequence.
        lr: learning rate of the actor.
        optimizer: called with parameter groups that carry their own rates: an ``lr`` given here is not used.
        lr_schedule: over iterations, see `modules.schedules`.
        warmup_steps: iterations of linear warm-up.
        min_lr_ratio: share of the rate at the end of a linear or cosine schedule.
        max_grad_norm: gradients are clipped to this norm, actor and critic each on their own; null switches it off.
        max_skipped_steps: stop after so many optimizer steps in a row without a finite gradient.
        **kwargs: how the models are built, see `ModelSettings`.
    """

    def __init__(
        self,
        model: str,
        micro_batch_tokens: PositiveInt = 16384,
        lr: PositiveFloat = 1e-6,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, weight_decay=0.0, fused=True),
        lr_schedule: Schedule = "constant",
        warmup_steps: NonNegativeInt = 0,
        min_lr_ratio: NonNegativeFloat = 0.0,
        max_grad_norm: PositiveFloat | None = 1.0,
        max_skipped_steps: PositiveInt = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(ModelSettings(model, **kwargs), lr)
        self.automatic_optimization = False
        self.micro_batch_tokens, self.optimizer = micro_batch_tokens, optimizer
        self.lr_schedule, self.warmup_steps, self.min_lr_ratio = lr_schedule, warmup_steps, min_lr_ratio
        self.max_grad_norm, self.max_skipped_steps = max_grad_norm, max_skipped_steps
        self._skipped_in_a_row = 0

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameter_groups())
        total = self.trainer.estimated_stepping_batches
        if total == float("inf") and self.lr_schedule != "constant":
            raise ValueError(f"model.lr_schedule {self.lr_schedule} needs an end: set trainer.max_steps or max_epochs")
        iterations = 1 if total == float("inf") else int(total)
        scheduler = warmup_schedule(optimizer, self.lr_schedule, self.warmup_steps, iterations, self.min_lr_ratio)
        return [optimizer], [scheduler]

    def step_optimizer(self, metrics: Metrics, last: bool) -> None:
        """Clip and check each role, then step once; a role without a finite norm keeps its weights and is counted."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        norms = clip_roles(optimizer.param_groups, self.max_grad_norm)
        for role, norm in norms.items():
            if norm is not None:
                metrics.mean(f"{role}/grad_norm", norm)
            metrics.sum(f"{role}/skipped_steps", float(norm is None) / self.strategy.dp_size)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if None in norms.values() else 0
        if last:
            optimizer.step()
            self.iteration = self.trainer.global_step
        else:
            self.trainer.strategy.optimizer_step(optimizer.optimizer, do_nothing_closure)
        optimizer.zero_grad()
        self.weight_version += 1
        if self._skipped_in_a_row >= self.max_skipped_steps:
            raise RuntimeError(
                f"the gradient norm was not finite in {self._skipped_in_a_row} optimizer steps in a row: lower model.lr or"
                " look at the rewards and log-probs of the last rollout"
            )

    @property
    def split(self) -> Split:
        """How this rank's share of any batch is found."""
        strategy = self.strategy
        return Split(
            data_ranks=strategy.dp_size,
            data_rank=strategy.dp_rank,
            sequence_ranks=strategy.sequence_parallel_size,
            sequence_rank=strategy.sp_rank,
            tokens=self.micro_batch_tokens,
            cost=attention_cost(self.actor.hidden_size),
            device=self.device,
        )

    @property
    def is_logging_iteration(self) -> bool:
        every = max(1, self.trainer.log_every_n_steps)  # type: ignore[attr-defined]
        return (self.trainer.fit_loop.total_batch_idx + 1) % every == 0

    def _schedulers(self) -> list[Any]:
        schedulers = self.lr_schedulers()
        return schedulers if isinstance(schedulers, list) else [] if schedulers is None else [schedulers]

    def forget(self, names: set[str]) -> None:
        """Metrics that are not measured in every iteration: Lightning would log their last value again."""
        for key, result in (self.trainer._results or {}).items():
            if result.meta.name in names and key.startswith("training_step."):
                result.reset()
