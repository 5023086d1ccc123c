"""The contract between the `RolloutCallback` and whatever generates.

One generation phase, in this order (the engine's memory is free between phases):

    wake(["weights"]) → load_weights → wake(["kv_cache"]) → generate → sleep

Token ids in, token ids out: nothing is tokenised twice. Every rank calls every method in the same order; ranks that share one
engine (``tensor_parallel_size`` consecutive ones) give it the same prompts, see `sharing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.types import Completion, PromptImages, Sampling

NamedTensors = Iterable[tuple[str, Tensor]]
"""(Hugging Face parameter name, full tensor) pairs; a tied parameter comes under each of its names."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine needs to know of the run. Derived by the `RolloutCallback` from the module and the data.

    Args:
        model: local folder with the model's config, tokenizer and (initial) weights.
        device: where this rank's part of the engine lives.
        dtype: the compute dtype of the trainer.
        eos_token_ids: every id that ends a response.
        pad_token_id: filler for engines that pad.
        max_model_len: longest prompt plus longest response, in tokens.
        max_num_seqs: responses of one generation phase in this engine: the most that are ever in flight.
        seed: of the run.
        trust_remote_code: as the user asked.
        config_overrides: changes of the model's transformers config.
        kv_cache_memory_bytes: size of the KV cache by the plan; None where that is the engine's to know.
        beside: it generates in a thread of its own while the trainer works on the same GPU.
    """

    model: str
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_model_len: int
    max_num_seqs: int
    seed: int = 0
    trust_remote_code: bool = False
    config_overrides: dict[str, Any] | None = None
    kv_cache_memory_bytes: int | None = None
    beside: bool = False

    def serves(self, other: EngineSetup) -> bool:
        """Whether an engine that was built for this can do the work of ``other``, in no more memory than that has for it.

        Fewer than all may be in flight at once, also for want of a larger cache.
        """
        same = ("model", "device", "dtype", "trust_remote_code", "config_overrides", "beside")
        held, room = self.kv_cache_memory_bytes, other.kv_cache_memory_bytes
        return (
            all(getattr(self, name) == getattr(other, name) for name in same)
            and other.max_model_len <= self.max_model_len
            and (room is None or (held is not None and held <= room))
        )


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU while the engine is awake.

    Args:
        weights: of the model.
        kv_cache: its size, or where ``least`` is given the size that is wanted.
        working: of a step of the engine; none between rollouts.
        least: smallest KV cache that it starts with, where the plan may choose the size; None: it may not.
        reserved: the KV cache is held from the start, not only while it is used.
    """

    weights: int
    kv_cache: int
    working: int = 0
    least: int | None = None
    reserved: bool = True

    @property
    def total(self) -> int:
        """While it generates."""
        return self.weights + self.kv_cache + self.working

    @property
    def idle(self) -> int:
        """Between rollouts, if it stays awake."""
        return self.weights + (self.kv_cache if self.reserved else 0)


class Unmapped(NamedTuple):
    """Bytes that torch's allocator counts as allocated and as reserved, and that have no memory."""

    allocated: int = 0
    reserved: int = 0


class RolloutEngine(ABC):
    """Generates responses with a copy of the policy's weights.

    ``tensor_parallel_size`` is the number of ranks that share one. ``weight_version`` is the version of the weights that the
    engine holds, or -1 when it holds none that may be used: `generate` must then raise instead of producing noise.
    """

    context: EngineSetup
    """Of the run that it was last set up for."""
    tensor_parallel_size: int = 1
    weight_version: int = -1
    memory_settings: str = "what rollout.engine holds"
    """The settings to lower when the GPU is too small, for error messages."""

    @abstractmethod
    def setup(self, context: EngineSetup) -> None:
        """Build the engine. Called before each run, with an empty device and after the process group is up.

        One that is there is kept if it can do the work of the run, and built anew otherwise: see `keeps`.
        """

    def keeps(self, context: EngineSetup) -> bool:
        """Go on with the engine that is there if it `EngineSetup.serves` the next run, else close it."""
        if not self.context.serves(context):
            self.close()
            return False
        held = self.context
        self.context = replace(
            context, max_model_len=held.max_model_len, kv_cache_memory_bytes=held.kv_cache_memory_bytes
        )
        return True

    def check_sampling(self, sampling: Sampling) -> None:  # noqa: B027 (an engine may draw in every way)
        """Raise ValueError if it cannot draw so. Called before anything is loaded, too."""

    @abstractmethod
    def wake(self, tags: Sequence[str]) -> None:
        """Take back the memory of ``tags``, a subset of ("weights", "kv_cache"). Waking what is awake does nothing."""

    @abstractmethod
    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Replace all weights and drop caches computed with the old ones."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int | None],
        log_probs: bool = False,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """One response per entry of ``prompts`` (repeat a prompt to get several), in the same order.

        Args:
            prompts: token ids.
            sampling: how to draw; ``num_generations`` was already applied by the caller.
            seeds: one per entry; a response is a function of (weights, prompt, sampling, seed) as far as the kernels allow.
                None: the greedy response, `Sampling.greedy`.
            log_probs: return the log-prob of each sampled token under the distribution it was drawn from.
            images: the pictures of each entry; left out when no prompt has any.

        Raises:
            RuntimeError: no usable weights (asleep, or level-2 sleep without a re-load).
        """

    def interrupt(self) -> None:  # noqa: B027 (an engine may have no steps to stop between)
        """Let a `generate` of another thread end soon, by an error: the run is over and the engine is closed next."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Give memory back: 0 keeps everything, 1 drops the KV cache and parks the weights on the host, 2 drops both.

        After level 2 `generate` raises until `load_weights` ran. An engine that cannot sleep still stops accepting work.
        """

    @property
    def unmapped(self) -> Unmapped:
        """Of the engine while it sleeps, if it keeps its addresses in torch's allocator."""
        return Unmapped()

    @property
    def context_limit(self) -> int | None:
        """Longest sequence it was configured for; None adapts to the run."""
        return None

    def plan_memory(self, weights: int, kv_token: int, context: int, sequences: int, device: int) -> EngineMemory:
        """What it will hold, before it is set up.

        Args:
            weights: bytes of the model in the compute dtype, this GPU's share.
            kv_token: bytes of the cache per token, likewise.
            context: longest sequence, in tokens.
            sequences: most that are in flight in the engine.
            device: bytes of the GPU's memory, 0 if that is not known.
        """
        return EngineMemory(weights, sequences * context * kv_token)

    def checksum(self) -> int | None:
        """`weights.checksum` of the model that is held, or None if it cannot be read (packed by the kernel library).

        A collective of the ranks that share the engine: all of them get the whole model's.
        """
        return None

    def close(self) -> None:  # noqa: B027 (an engine may have nothing to free)
        """Free everything; leaves the trainer's process groups alone."""
