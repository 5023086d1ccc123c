"""`SupervisedLightningModule`: one optimizer step on rows that are learned as they are, the base of SFT, reward model and DPO.

    examples of the step, whole on every rank
      → prepare: what needs no gradient
      → packed micro-batch: loss → backward;   clip → step

As in `base`, the loss of a micro-batch is W · Σ w · l, with w the share of a token or pair in the GLOBAL step and W the ranks
that FSDP averages over: results depend neither on the number of ranks nor on micro-batches.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.modules.batching import MicroBatch, example_batches
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.numbers import PositiveFloat
from lightning_rlhf.modules.training import TrainedModule
from lightning_rlhf.types import Examples


class SupervisedLightningModule(TrainedModule):
    """What SFT, reward model and DPO share; each is a `loss` and the metrics it adds.

    Args:
        model: local folder or hub id of the model to train, or ``random:tiny``.
        lr: learning rate.
        **kwargs: see `TrainedModule` (an iteration is an optimizer step here) and `ModelSettings`.
    """

    example_size = 1
    """Sequences of an example: 2 of a pair."""

    ends_only = False
    """Whether an example is read at the ends of its sequences, which are then tokenised as a whole."""

    def __init__(self, model: str, lr: PositiveFloat = 1e-5, **kwargs: Any) -> None:
        super().__init__(model, lr=lr, **kwargs)
        self._validation: Metrics | None = None

    def setup(self, stage: str) -> None:
        """Refuse what cannot work before any weights are loaded.

        Raises:
            ValueError: the data is of another kind, its longest sequence is too long for the model, or its longest example for a
                micro-batch.
        """
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and getattr(data, "example_size", None) != self.example_size:
            kind = "SFTDataModule" if self.example_size == 1 else "PreferenceDataModule"
            raise ValueError(
                f"{type(self).__name__} needs data.class_path: lightning_rlhf.{kind}, or one of your own whose example_size is"
                f" {self.example_size}, got {type(data).__name__}"
            )
        limit = self.check_models()
        longest, example = (getattr(data, name, 0) for name in ("longest_sequence", "longest_example"))
        if longest > limit:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds the model's {limit} positions: set data.max_length to {limit}"
            )
        if example > (budget := self.micro_batch_tokens * self.strategy.sequence_parallel_size):
            raise ValueError(
                f"an example of {example} tokens does not fit a micro-batch of {budget}: raise model.micro_batch_tokens, or set"
                " data.max_length"
            )

    # -- one step ------------------------------------------------------------------------------------

    @abstractmethod
    def loss(
        self, examples: Examples, batch: MicroBatch, prepared: Any, metrics: Metrics, measured: bool
    ) -> Float[Tensor, ""]:
        """This micro-batch's part of the step's loss, Σ w · l; adds the metrics of its examples.

        Args:
            prepared: what `prepare` gave for this micro-batch.
            measured: add metrics that cost time, too.
        """

    def read(self, examples: Examples) -> Examples:
        """What the model sees of a batch."""
        return examples

    def batches(self, examples: Examples) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches, and the tokens that all ranks spend time on; see `example_batches`."""
        return example_batches(examples, self.split, ends_only=self.ends_only)

    def prepare(self, batches: list[MicroBatch]) -> list[Any]:
        """What the loss of each micro-batch needs and has no gradient."""
        return [None] * len(batches)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        examples = self.read(batch["examples"])
        metrics = Metrics(self.device)
        with self.phases("update"):
            batches, spent = self.batches(examples)
            for micro, prepared in zip(batches, self.prepare(batches), strict=True):
                loss = self.loss(examples, micro, prepared, metrics, self.is_logging_iteration)
                self.manual_backward(loss * self.trainer.world_size)
            self.step_optimizer(metrics, last=True)
            self.step_schedulers()
        self.lengths = [len(sequence) for sequence in examples.sequences]
        self.packing = {"real_tokens": sum(self.lengths), "padded_tokens": spent}
        roles = self.learning_rates
        reduced = metrics.reduce(self.strategy.all_reduce_dp)
        named = {name if name.partition("/")[0] in roles else f"train/{name}": value for name, value in reduced.items()}
        self.log_reduced(named, len(examples))
        self.log("loss", reduced["loss"], prog_bar=True, logger=False, batch_size=len(examples))

    # -- validation ----------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._validation = Metrics(self.device)

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        examples = self.read(batch["examples"])
        assert self._validation is not None
        batches, _ = self.batches(examples)
        for micro, prepared in zip(batches, self.prepare(batches), strict=True):
            self.loss(examples, micro, prepared, self._validation, measured=True)
        self.strategy.reshard(self.root)

    def on_validation_epoch_end(self) -> None:
        assert self._validation is not None
        found = self.validated(self._validation.reduce(self.strategy.all_reduce_dp))
        self.log_validated({f"{self.validation_set(0)}/{name}": value for name, value in found.items()})

    def validated(self, reduced: dict[str, float]) -> dict[str, float]:
        """The metrics of a validation, from their means over all of it."""
        return reduced
