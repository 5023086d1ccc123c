"""Engines of the benchmarks: responses of given lengths, or recorded ones; notes of when training starts and of what it does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from benchmarks.lengths import Lengths
from benchmarks.recorded import Recorded
from lightning_rlhf.rollout import RolloutEngine, TransformersEngine, VLLMEngine
from lightning_rlhf.rollout.engine import EngineSetup, NamedTensors
from lightning_rlhf.types import Completion, Sampling

NOTED = {"reward": "reward/mean", "norm": "actor/grad_norm"}


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


class Diary(pl.Callback):
    """Appends a line per iteration to a file: hashes of the first rank's responses, mean reward, gradient norm, processes.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        processes = [os.getpid()]
        if trainer.world_size > 1:
            processes = [0] * trainer.world_size
            dist.all_gather_object(processes, os.getpid())
        if not trainer.is_global_zero:
            return
        hashes = [sha256(str(ids.tolist()).encode()).hexdigest()[:16] for ids in pl_module.last_experience.sequences]
        metrics = {name: float(trainer.callback_metrics[key]) for name, key in NOTED.items()}
        entry = {"iteration": trainer.global_step, "responses": hashes, "processes": processes, **metrics}
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
