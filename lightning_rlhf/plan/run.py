"""A run in numbers: read off the configured objects, before any of them has set anything up.

    module, data, rollout, strategy ── read_run ──▶ Run ──▶ checks.py (what cannot work), memory.py (what it needs)

One iteration has ``prompts`` x ``num_generations`` responses. Each of its ``ppo_epochs`` x ``mini_batches`` optimizer steps
covers an equal share of them, packed into streams of at most ``micro_batch_tokens`` x ``sequence_ranks`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lightning_rlhf.ulysses import longest_sequence

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.rollout import RolloutCallback
    from lightning_rlhf.modules.base import RLHFLightningModule
    from lightning_rlhf.rollout.engine import RolloutEngine
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


@dataclass(frozen=True)
class Run:
    """What the checks and estimates look at. Tokens and counts; of the whole run unless said otherwise.

    Args:
        world_size: processes, one per GPU.
        num_nodes: machines.
        strategy: the meshes' sizes.
        device_type: cuda or cpu.
        precision: as in ``trainer.precision``.
        param_dtype: of trained parameters, gradients and the optimizer's state.
        compute_dtype: of matrix products, activations and the engine.
        config: the policy's, of transformers.
        attention: kernel by name.
        prompts: per iteration; None if the data does not say.
        num_generations: responses per prompt.
        prompt_length: longest prompt; None if the data does not say.
        response_length: longest training response.
        val_response_length: longest validation response.
        learning_rates: by role.
        ppo_epochs: passes over a rollout.
        mini_batches: optimizer steps per pass.
        micro_batch_tokens: of one forward and backward pass on one GPU.
        engine: generates the responses.
        async_level: 1 if it does so beside the update.
        corrected: importance weights between engine and trainer.
        replayable: see `Sampling.replayable`, of training responses.
        async_save: checkpoints are written from a copy of the state in host memory.
        turns: most of a response.
        compares: the advantage estimator that compares the responses to a prompt with each other, by name.
    """

    world_size: int
    num_nodes: int
    strategy: FSDPUlyssesStrategy
    device_type: str
    precision: str
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    config: Any
    attention: str
    prompts: int | None
    num_generations: int
    prompt_length: int | None
    response_length: int
    val_response_length: int
    learning_rates: dict[str, float]
    ppo_epochs: int
    mini_batches: int
    micro_batch_tokens: int
    engine: RolloutEngine
    async_level: int = 0
    corrected: bool = False
    replayable: bool = True
    async_save: bool = False
    turns: int = 1
    compares: str | None = None

    @property
    def sequence_ranks(self) -> int:
        """GPUs that share a sequence."""
        return self.strategy.sequence_parallel_size

    @property
    def data_ranks(self) -> int:
        """GPUs, or groups of them, with different prompts."""
        return max(1, self.world_size // self.sequence_ranks)

    @property
    def engine_ranks(self) -> int:
        """GPUs that share an engine."""
        return self.engine.tensor_parallel_size

    @property
    def attention_heads(self) -> tuple[int | None, int | None]:
        """Query heads and key/value heads; None for a model without attention."""
        text = self.config.get_text_config()
        count = getattr(text, "num_attention_heads", None)
        return count, getattr(text, "num_key_value_heads", None) or count

    @property
    def cache_split(self) -> int:
        """GPUs over which an engine splits its KV cache: with more of them than key/value heads, heads are repeated."""
        return min(self.engine_ranks, self.attention_heads[1] or 1)

    @property
    def replicas(self) -> int:
        """Copies of the sharded parameters."""
        return self.strategy.replicas(self.num_nodes)

    @property
    def shards(self) -> int:
        """GPUs that the parameters are split over."""
        return max(1, self.world_size // self.replicas)

    @cached_property
    def positions(self) -> int:
        """Longest sequence that the model was made for, and that may be packed with others."""
        return longest_sequence(self.config)

    @property
    def longest(self) -> int:
        """Longest training sequence; its response alone where prompts have no known limit."""
        return (self.prompt_length or 1) + self.response_length

    @property
    def context(self) -> int:
        """What the engine must hold: the longest prompt and the longest response of training and validation."""
        response = max(self.response_length, self.val_response_length)
        return self.prompt_length + response if self.prompt_length else self.positions

    @property
    def budget(self) -> int:
        """Tokens of one packed stream."""
        return self.micro_batch_tokens * self.sequence_ranks

    @property
    def responses(self) -> int | None:
        """Per iteration."""
        return None if self.prompts is None else self.prompts * self.num_generations

    def stream_tokens(self, steps: int) -> int:
        """Largest micro-batch, in tokens of one GPU, when the iteration's responses are split into ``steps``."""
        if self.responses is None:
            return self.micro_batch_tokens
        sequences = -(-self.responses // (steps * self.data_ranks))
        return min(self.micro_batch_tokens, -(-sequences * self.longest // self.sequence_ranks))

    def image_tokens(self, steps: int) -> int:
        """At most so many tokens of pictures are in a micro-batch: as if prompts were full length and nothing but pictures.

        Every GPU that shares the stream computes all of them. Responses to one prompt share its pictures if the iteration is
        one step (its first and last prompt may have others in the streams beside); drawn into several steps, they may be apart.
        """
        sequences = -(-self.stream_tokens(steps) * self.sequence_ranks // self.longest)
        prompts = 1 - (1 - sequences) // self.num_generations if steps == 1 else sequences
        return prompts * (self.longest - self.response_length)

    @property
    def micro_batches(self) -> int | None:
        """Per optimizer step and data rank when every sequence has full length (shorter ones need fewer)."""
        per_stream = self.budget // self.longest
        if self.responses is None or not per_stream:
            return None
        return -(-self.responses // (self.mini_batches * self.data_ranks * per_stream))


def read_run(
    module: RLHFLightningModule,
    data: Any,
    rollout: RolloutCallback,
    strategy: FSDPUlyssesStrategy,
    *,
    config: Any,
    world_size: int,
    num_nodes: int,
    device_type: str,
    callbacks: Iterable[Any],
) -> Run:
    """The numbers of a configured run. ``data`` may be any LightningDataModule: what it does not say is None."""
    precision = strategy.precision_plugin
    return Run(
        world_size=world_size,
        num_nodes=num_nodes,
        strategy=strategy,
        device_type=device_type,
        precision=str(precision.precision),
        param_dtype=precision.param_dtype,
        compute_dtype=precision.compute_dtype,
        config=config,
        attention=module.settings.attention,
        prompts=getattr(data, "batch_size", None),
        num_generations=rollout.sampling.num_generations,
        prompt_length=getattr(data, "max_prompt_length", None) or getattr(data, "longest_prompt", None),
        response_length=rollout.whole(rollout.sampling).max_completion_length,
        val_response_length=rollout.whole(rollout.val_sampling).max_completion_length,
        learning_rates=module.learning_rates,
        ppo_epochs=module.ppo_epochs,
        mini_batches=module.mini_batches,
        micro_batch_tokens=module.micro_batch_tokens,
        engine=rollout.engine,
        async_level=rollout.async_level,
        corrected=module.correction is not None,
        replayable=rollout.sampling.replayable,
        turns=1 if rollout.conversation is None else rollout.conversation.max_turns,
        compares=module.advantage_function.__name__ if "groups" in module.estimator_takes else None,
        async_save=any(getattr(callback, "async_save", False) for callback in callbacks),
    )


def optimizer_bytes(optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Bytes of state per element of a trained parameter, by one step of the real optimizer on a small matrix.

    (Exact for any optimizer with a state per element; one that factors a matrix has less on large ones. An optimizer that
    only steps on a GPU counts as Adam.)
    """
    parameter = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    try:
        made = optimizer([{"params": [parameter], "lr": 1e-6, "role": "actor"}])
        made.step()
    except (RuntimeError, ValueError, AssertionError):
        return 2.0 * dtype.itemsize
    held = [value for state in made.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in held if value.dim() > 0) / parameter.numel()
