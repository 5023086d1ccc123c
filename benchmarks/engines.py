"""Engines of the benchmarks: responses of given lengths, or recorded ones; and a note of when training starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from benchmarks.lengths import Lengths
from benchmarks.recorded import Recorded
from lightning_rlhf.rollout import RolloutEngine, TransformersEngine, VLLMEngine
from lightning_rlhf.rollout.engine import EngineSetup, NamedTensors
from lightning_rlhf.types import Completion, Sampling


class _Forced(RolloutEngine):
    """Ends each response at a length of its own; for training only. Engines must get equally many responses.

    Args:
        lengths: see `Lengths.parse`; the longest must not exceed ``sampling.max_completion_length``.
        **kwargs: of the engine.
    """

    def __init__(self, lengths: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lengths = Lengths.parse(lengths)
        self._iteration = 0
        self._limits: dict[int, int] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int], **kwargs: Any
    ) -> list[Completion]:
        engine = (dist.get_rank() if dist.is_initialized() else 0) // self.tensor_parallel_size
        first = engine * len(prompts)
        self._limits = {seed: self.lengths(self._iteration, first + i) for i, seed in enumerate(seeds)}
        self._iteration += 1
        return super().generate(prompts, sampling, seeds=seeds, **kwargs)  # type: ignore[safe-super]

    def _limited(self, sampling: Sampling, seed: int) -> Sampling:
        return replace(sampling, max_completion_length=self._limits[seed])


class ForcedVLLM(_Forced, VLLMEngine):
    """`VLLMEngine` with responses of given lengths."""

    def _sampling_params(self, sampling: Sampling, seed: int, log_probs: bool) -> Any:
        return super()._sampling_params(self._limited(sampling, seed), seed, log_probs)


class ForcedTransformers(_Forced, TransformersEngine):
    """`TransformersEngine` with responses of given lengths."""

    def _row(self, prompt: Sequence[int], seed: int, images: Any, sampling: Sampling) -> Any:
        return super()._row(prompt, seed, images, self._limited(sampling, seed))


class Replay(RolloutEngine):
    """Returns recorded responses, in every iteration the same ones, whatever the weights are.

    Args:
        path: see `Recorded`.
    """

    def __init__(self, path: str) -> None:
        self._recorded = Recorded(path)

    def setup(self, context: EngineSetup) -> None: ...

    def wake(self, tags: Sequence[str]) -> None: ...

    def sleep(self, level: int) -> None: ...

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        self.weight_version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, **_: Any) -> list[Completion]:
        return [Completion(token_ids, "length") for token_ids in self._recorded(prompts)]


class Started(pl.Callback):
    """Writes the time at which the first iteration begins into the log folder."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        now, folder = time.time(), trainer.log_dir  # a broadcast: on every rank
        if trainer.is_global_zero and folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "started").write_text(str(now))
