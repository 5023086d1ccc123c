"""The console: one bar over the whole run in a terminal, one line per iteration in a log file."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class IterationProgress(RichProgressBar):
    """Counts iterations from the run's beginning to its end, resumed runs included. (Lightning's own bars count the batches of
    an epoch.)
    """

    @property
    def total_train_batches(self) -> int | float:
        """Iterations of the whole run; infinity if nothing limits it."""
        trainer = self.trainer
        per_epoch, epochs = trainer.num_training_batches, trainer.max_epochs
        limits: list[int | float] = [trainer.max_steps] if trainer.max_steps >= 0 else []
        limits += [per_epoch * epochs] if epochs is not None and epochs >= 0 else []
        return min(limits, default=float("inf"))

    def _get_train_description(self, current_epoch: int) -> str:
        return "Iteration "  # as wide as "Validation"

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.train_progress_bar_id is None:
            super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.global_step - 1)
        if self.is_enabled and not sys.stdout.isatty():
            metrics = self.get_metrics(trainer, pl_module)
            shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if isinstance(v, float))
            print(f"iteration {trainer.global_step}/{self.total_train_batches}  {shown}", flush=True)
