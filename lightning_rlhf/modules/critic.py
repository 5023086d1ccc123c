"""Critics and reward models: a backbone with a scalar head as an FSDP2 root; and the check of any role before it is loaded.

forward(packed) -> (b, T) values of the states before each response token; of a stream by `pack_ends` (b, 1) scores
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.hf_config import HeadKind
from lightning_rlhf.modules.execution import apply_execution, check_layers
from lightning_rlhf.modules.loading import check_shapes, load_pretrained, meta_parameters
from lightning_rlhf.modules.lora import Adapter, hf_name
from lightning_rlhf.modules.policy import (
    PackedModel,
    added_names,
    causal_lm,
    policy_on_meta,
    saved_buffers,
    stored_dtype,
)
from lightning_rlhf.modules.score_head import head_names, start_head
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.startup import check_isolation
from lightning_rlhf.packing import Packed
from lightning_rlhf.ulysses import longest_sequence

if TYPE_CHECKING:
    from lightning_rlhf.precision import FSDP2Precision
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


class Critic(PackedModel):
    """A backbone with a scalar head; ``forward(packed)`` returns values of the states before each response token, (b, T).

    Of a stream by `pack_ends` those are the scores of the sequences, (b, 1): a reward model. The head is float32 with float32
    output: bfloat16 steps near 1 are 0.008, coarser than the advantages.

    Args:
        prefix: what transformers puts before the names of the backbone.
        bias: of the head.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: FSDPUlyssesStrategy,
        settings: ModelSettings,
        prefix: str = "model.",
        bias: bool = True,
    ) -> None:
        super().__init__(model, strategy, settings)
        self.value_head = nn.Linear(self.hidden_size, 1, bias=bias, dtype=torch.float32)
        self.prefix = prefix

    @property
    def backbone(self) -> nn.Module:
        return self.model

    def forward(self, packed: Packed) -> Float[Tensor, "b T"]:
        return self.align(self.value_head(self.hidden_rows(packed)).squeeze(-1).float(), packed)

    def hf_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, shard) pairs of a classification model, an adapter merged."""
        return scored_parameters(self)

    def hf_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.hf_named_buffers`."""
        yield from ((self.prefix + hf_name(name), buffer) for name, buffer in saved_buffers(self.model))

    @property
    def head_kind(self) -> HeadKind:
        return "score" if self.value_head.bias is None else "values"

    @property
    def units(self) -> list[nn.Module]:
        return self.layers


def scored_parameters(
    critic: Any, value: Callable[[nn.Parameter], Tensor] = lambda p: p
) -> Iterator[tuple[str, Tensor]]:
    """(transformers name, tensor) pairs of a critic, sharded or not.

    Args:
        value: of a parameter, asked for once each.
    """
    if critic.adapter is not None:
        yield from ((critic.prefix + name, tensor) for name, tensor in critic.adapter.merged(value))
    else:
        yield from ((critic.prefix + name, value(parameter)) for name, parameter in critic.model.named_parameters())
    yield from ((f"score.{name}", value(parameter)) for name, parameter in critic.value_head.named_parameters())


def check_model(settings: ModelSettings, strategy: FSDPUlyssesStrategy, *, critic: bool = False) -> int:
    """Refuse a model that cannot be trained here, before its weights are loaded; returns the longest sequence it takes.

    Raises:
        NotImplementedError: the model.
        ValueError: the attention kernel, or weights of another shape than the config's.
    """
    root = _critic_on_meta(settings, strategy) if critic else policy_on_meta(settings, strategy, frozen=False)
    check_layers(root.model, root.layers, settings)
    prefix, added = getattr(root, "prefix", ""), {name.removeprefix("model.") for name in added_names(root)}
    check_shapes(root.model, settings.path, lambda name: prefix + hf_name(name), added, settings.key)
    return longest_sequence(root.model.config)


class UnshardedCritic(nn.Module):
    """A critic's parameters on the meta device, under the names that they have in a run."""

    def __init__(self, settings: ModelSettings, precision: FSDP2Precision, bias: bool) -> None:
        super().__init__()
        with meta_parameters():
            causal = causal_lm(settings, stored_dtype(settings, precision), precision)
            self.model, self.prefix = causal.base_model, f"{causal.base_model_prefix}."
            self.adapter = None if settings.lora is None else _critic_adapter(causal, settings, precision)
            self.value_head = nn.Linear(causal.config.get_text_config().hidden_size, 1, bias=bias, dtype=torch.float32)  # type: ignore[union-attr,operator]


def _critic_adapter(causal: nn.Module, settings: ModelSettings, precision: FSDP2Precision) -> Adapter:
    """Of its own, always a new one."""
    assert settings.lora is not None
    fresh = replace(settings.lora, adapter=None)
    return Adapter(causal, fresh, precision.param_dtype, part=causal.base_model)  # type: ignore[arg-type]


def build_critic(
    settings: ModelSettings,
    strategy: FSDPUlyssesStrategy,
    *,
    seed: int = 0,
    bias: bool = True,
    std: float = 0.0,
    frozen: torch.dtype | None = None,
    role: str = "critic",
) -> Critic:
    """A critic or reward model from ``settings.path``. The head is that of a classification model, or a new one.

    With LoRA the backbone is frozen and has an adapter of its own, which starts anew; the head is trained as ever.

    Args:
        bias: of the head.
        std: of a new head's weights; its values start at 0 by default.
        frozen: no gradients, and the backbone in this dtype.
        role: what it is, for messages.
    """
    critic = _critic_on_meta(settings, strategy, bias, frozen)
    apply_execution(critic.model, critic.layers, settings, strategy.root_device, trained=frozen is None)
    on_host = frozen is not None and settings.offload_reference
    strategy.shard_float32(critic.value_head, on_host)
    critic.shard(strategy, frozen=frozen is not None, on_host=on_host)
    strategy.materialize(critic, on_host=on_host)
    stored = head_names(settings, bias)
    new = tuple(n for n, _ in critic.named_parameters() if n.startswith("value_head.") and n not in stored)

    def in_folder(name: str) -> str:
        return stored.get(name) or critic.prefix + hf_name(name.removeprefix("model."))

    load_pretrained(critic, settings, strategy, in_folder, (*new, *added_names(critic)))
    if critic.adapter is not None:
        critic.adapter.start(seed)
    if new:
        start_head(critic.value_head, std, seed, new)
    critic.train(frozen is None)
    check_isolation(critic, strategy, critic, role)
    return critic


def _critic_on_meta(
    settings: ModelSettings, strategy: FSDPUlyssesStrategy, bias: bool = True, frozen: torch.dtype | None = None
) -> Critic:
    with meta_parameters():
        precision = strategy.precision_plugin
        causal = causal_lm(settings, frozen or stored_dtype(settings, precision), precision)
        critic = Critic(causal.base_model, strategy, settings, f"{causal.base_model_prefix}.", bias)  # type: ignore[arg-type]
        if settings.lora is not None and frozen is None:
            critic.adapter = _critic_adapter(causal, settings, precision)
    return critic
