"""`TrainedModule`: packed micro-batches, one optimizer over all roles, steps that a bad gradient cannot spoil.

``training_step`` of a subclass calls ``manual_backward`` for each micro-batch of an optimizer step, then `step_optimizer`;
``trainer.global_step`` counts its calls with ``last=True``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_rlhf.flops import Passes, dims_of, frozen
from lightning_rlhf.modules.adamw import ShardedAdamW
from lightning_rlhf.modules.batching import Split
from lightning_rlhf.modules.critic import Critic
from lightning_rlhf.modules.gradients import clip_roles
from lightning_rlhf.modules.lora import trained_matrices
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.numbers import PositiveFloat
from lightning_rlhf.modules.policy import Policy
from lightning_rlhf.modules.report import outlive
from lightning_rlhf.modules.roles import ModelRoles
from lightning_rlhf.modules.schedules import Schedule, warmup_schedule
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.options import parameters_of, suggestion
from lightning_rlhf.packing import attention_cost
from lightning_rlhf.phases import Phases

_OPTIONS = ("initial_lr", "weight_decay", "betas", "eps")
"""Of a group of parameters, those that a resumed run may change; what else is there may be what an optimizer counts."""


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

    Attributes:
        phases: spans of an iteration.
        lengths: tokens of each sequence of the last iteration.
        packing: ``real_tokens`` of its streams, and ``padded_tokens`` that the ranks spent time on.
    """

    def __init__(
        self,
        model: str,
        micro_batch_tokens: PositiveInt = 16384,
        lr: PositiveFloat = 1e-6,
        optimizer: OptimizerCallable = lambda params: ShardedAdamW(params, weight_decay=0.0),
        lr_schedule: Schedule = "constant",
        warmup_steps: NonNegativeInt = 0,
        min_lr_ratio: ClosedUnitInterval = 0.0,
        max_grad_norm: PositiveFloat | None = 1.0,
        max_skipped_steps: PositiveInt = 10,
        **kwargs: Any,
    ) -> None:
        try:
            settings = ModelSettings(model, **kwargs)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None:
                raise
            known = parameters_of(type(self)) | parameters_of(ModelSettings)
            raise TypeError(
                f"{type(self).__name__} has no option {unknown[1]!r}{suggestion(unknown[1], known)}"
            ) from None
        super().__init__(settings, lr)
        self.automatic_optimization = False
        self.micro_batch_tokens, self.optimizer = micro_batch_tokens, optimizer
        self.lr_schedule, self.warmup_steps, self.min_lr_ratio = lr_schedule, warmup_steps, min_lr_ratio
        self.max_grad_norm, self.max_skipped_steps = max_grad_norm, max_skipped_steps
        self.phases = Phases()
        self.lengths: list[int] = []
        self.packing: dict[str, int] = {}
        self._skipped_in_a_row = 0
        self._chosen: list[list[dict[str, Any]]] = []
        self._logged: set[str] = set()

    def check_models(self) -> int:
        self.check_options()
        return super().check_models()

    def check_options(self) -> None:
        """Refuse what is wrong whatever the models are.

        Raises:
            ValueError: a learning rate, or an option of the optimizer, which is made once, of a weight for each role.
        """
        groups = []
        for role, rate in self.learning_rates.items():
            if not isinstance(rate, float | int) or not 0.0 < rate < math.inf:
                name = "model.critic_lr" if role == "critic" else "model.lr"
                raise ValueError(f"{name} must be above 0 and finite, got {rate!r}")
            groups.append({"params": [nn.Parameter(torch.zeros(1, 1))], "lr": rate, "role": role})
        try:
            made = self.optimizer(groups)
        except (ValueError, TypeError) as error:
            raise ValueError(f"model.optimizer: {error}") from error
        for name, value in made.param_groups[0].items():
            numbers = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"model.optimizer: {name} must be finite, got {value}")

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameter_groups())
        total = self.trainer.estimated_stepping_batches
        if total == float("inf") and self.lr_schedule != "constant":
            raise ValueError(f"model.lr_schedule {self.lr_schedule} needs an end: set trainer.max_steps or max_epochs")
        iterations = 1 if total == float("inf") else int(total)
        scheduler = warmup_schedule(optimizer, self.lr_schedule, self.warmup_steps, iterations, self.min_lr_ratio)
        return [optimizer], [scheduler]

    def on_fit_start(self) -> None:
        self._check_schedulers()
        self._look_for_untrained()
        # of a fit that was interrupted: its last iteration was begun, and begins again
        self.trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()
        outlive(self.trainer.loggers)
        self._chosen = [  # before a checkpoint is restored
            [{name: group[name] for name in _OPTIONS if name in group} for group in schedule.optimizer.param_groups]
            for schedule in self._schedules()
        ]

    def _check_schedulers(self) -> None:
        """Raise ValueError if one of `configure_optimizers` must be told a metric, which `step_schedulers` does not do."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        asks = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in found)
        if asks and type(self).step_schedulers is TrainedModule.step_schedulers:
            raise ValueError(
                "configure_optimizers gave a ReduceLROnPlateau, whose step() needs a metric: take another scheduler, or override"
                " step_schedulers() to hand it one; self.trainer.callback_metrics then has those of the iteration before"
            )

    def _look_for_untrained(self) -> None:
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        own = {name.split(".")[0] for name, p in self.named_parameters() if p.requires_grad and id(p) not in held}
        if groups and own:  # without an optimizer the first step says so
            rank_zero_warn(
                f"{type(self).__name__}: no optimizer has the parameters of {', '.join(sorted(own))}: freeze them with"
                " requires_grad_(False), or add a group of them in configure_optimizers and sum their gradients over the ranks"
            )

    def on_train_start(self) -> None:
        """The rates and options of a resumed run are those that it is given; what was restored are its checkpoint's."""
        total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        total.ready = total.processed  # a checkpoint out of an iteration: it begins again
        for schedule, given in zip(self._schedules(), self._chosen if self.trainer.ckpt_path else (), strict=False):
            for group, own, factor in zip(schedule.optimizer.param_groups, given, schedule.lr_lambdas, strict=True):
                for name, value in own.items():
                    if (then := group.get(name)) != value:
                        what = f"{group.get('role', 'optimizer')} {name.removeprefix('initial_')}"
                        rank_zero_info(f"{what}: {then} in the checkpoint, {value} from here on")
                group |= own | {"lr": own["initial_lr"] * factor(schedule.last_epoch)}
            schedule.base_lrs = [own["initial_lr"] for own in given]

    def _schedules(self) -> list[LambdaLR]:
        """Factors on rates; schedules of another kind, by a `configure_optimizers` of one's own, are restored as they were."""
        schedules = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return [schedule for schedule in schedules if isinstance(schedule, LambdaLR)]

    def step_optimizer(self, metrics: Metrics, last: bool) -> None:
        """Clip and check each role, then step once; a role without a finite norm keeps its weights and is counted."""
        optimizer = self.one_optimizer()
        roles = self.parameters_by_role(optimizer.param_groups)
        norms = clip_roles([{"role": r, "params": own} for r, own in roles.items()], self.max_grad_norm)
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

    def one_optimizer(self) -> Any:
        """The optimizer of all roles.

        Raises:
            ValueError: `configure_optimizers` gave none, or several.
        """
        found = self.optimizers()
        if isinstance(found, list) or not found.param_groups:
            got = len(found) if isinstance(found, list) else "none"
            raise ValueError(f"configure_optimizers must give one optimizer, with a group for each role, got {got}")
        return found

    def parameters_by_role(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, list[nn.Parameter]]:
        """What an optimizer trains, by the role that its group names, or by the model it is in where `configure_optimizers` made
        groups of its own."""
        found: dict[str, list[nn.Parameter]] = {}
        owners: dict[nn.Parameter, str] = {}
        if not all("role" in group for group in groups):
            owners = {parameter: name.partition(".")[0] for name, parameter in self.named_parameters()}
        for group in groups:
            for parameter in group["params"]:
                role = group["role"] if "role" in group else owners[parameter]
                found.setdefault(role, []).append(parameter)
        return found

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
            cost=attention_cost(self.settings.config.get_text_config().hidden_size),
            device=self.device,
        )

    @property
    def is_logging_iteration(self) -> bool:
        every = max(1, self.trainer.log_every_n_steps)  # type: ignore[attr-defined]
        return (self.trainer.fit_loop.total_batch_idx + 1) % every == 0

    def step_schedulers(self) -> None:
        """Once per iteration."""
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()  # type: ignore[call-arg]

    def log_reduced(self, reduced: dict[str, float], batch_size: int) -> None:
        """Log an iteration's metrics with the rates; equal on every rank, so that nothing is synchronised."""
        for group in self.one_optimizer().param_groups:
            for role in self.parameters_by_role([group]):
                reduced.setdefault(f"{role}/lr", group["lr"])
        self.forget(self._logged - reduced.keys())
        self._logged = set(reduced)
        self.log_dict(reduced, sync_dist=False, batch_size=batch_size)

    def forget(self, names: set[str]) -> None:
        """Metrics that are not measured in every iteration: Lightning would log their last value again."""
        for key, result in (self.trainer._results or {}).items():
            if result.meta.name in names and key.startswith("training_step."):
                result.reset()

    # -- validation: `test` is the same under another name ------------------------------------------------------

    def validation_set(self, dataloader_idx: int) -> str:
        """Its name in metrics and samples."""
        names = getattr(getattr(self.trainer, "datamodule", None), "val_names", None) or ["heldout"]
        return names[dataloader_idx] if dataloader_idx < len(names) else f"heldout_{dataloader_idx}"

    def log_validated(self, found: Mapping[str, Any]) -> None:
        """Log a validation's metrics in ``val/…``, a test's in ``test/…``; outside of training with the iteration of the weights.

        Args:
            found: by ``<set>/<metric>``, equal on every rank.
        """
        loop = "test" if self.trainer.testing else "val"
        named = {f"{loop}/{name}": value for name, value in found.items()}
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        step = {} if fitting else {"step": float(self.iteration)}  # Lightning knows no other than 0
        self.log_dict(named | step, sync_dist=False, batch_size=1)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()


def passes_of(
    root: Policy | Critic, outputs: int | None, forward: float, backward: float, *, adapted: bool = True
) -> list[Passes]:
    """What the update is worth of one role; empty for a model whose FLOPs are not known.

    Args:
        outputs: of the head, if it is not the vocabulary.
        forward: times that a sequence goes through it.
        backward: likewise.
        adapted: with its adapter, if it has one.
    """
    try:
        dims = dims_of(root.model.config, outputs)
    except ValueError:
        return []
    if adapted and root.adapter is not None:
        dims = frozen(dims, *trained_matrices(root))
    return [Passes(dims, forward, backward)]
