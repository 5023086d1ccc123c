"""`PlanSummary`: the resolved set-up in seven lines, and what it costs, on the first process, before anything is loaded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_rlhf.callbacks.planning import device_memory, plan_of
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.plan.table import show, summary


class PlanSummary(pl.Callback):
    """Prints meshes, batch arithmetic, estimated memory and warnings when a fit begins.

    The command line adds it beside Lightning's model summary: ``trainer.enable_model_summary: false`` removes both.
    """

    @rank_zero_only
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        rollout = next((c for c in trainer.callbacks if isinstance(c, RolloutCallback)), None)  # type: ignore[attr-defined]
        if stage != "fit" or rollout is None:
            return
        try:
            memory = device_memory(pl_module.strategy.root_device)
            plan = rollout.drafted = plan_of(trainer, pl_module, rollout, memory)
        except Exception as error:  # an observer ends no run; what cannot work is the `RolloutCallback`'s to say
            rank_zero_info(f"there is no summary of this run: {error}")
            return
        show(summary(plan))
