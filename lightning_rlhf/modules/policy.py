"""Actor, reference and critic as FSDP2 roots. Parallelism ends here: nothing above this file sees a shard.

    forward(packed, …) -> (b, T) tensors aligned with the responses, whole on every rank of a sequence-parallel group

A transformers model is built on the meta device, its attention made packed (`ulysses`), its head replaced (`LogProbHead`), then
sharded, allocated, and every rank reads its own slices of the safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.images import auto_class, is_vision_language
from lightning_rlhf.modules.head import LogProbHead
from lightning_rlhf.modules.loading import load_pretrained, meta_parameters
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.vision import freeze, merged_inputs, shard_tower
from lightning_rlhf.packing import Packed
from lightning_rlhf.ulysses import check_packable, gather_sequence, group_size, shard_sequence, use_packed_attention

if TYPE_CHECKING:
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


class _PackedModel(nn.Module):
    """A transformers causal LM (or its backbone) over packed, sequence-sharded streams that are on its device."""

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, kernel: str) -> None:
        super().__init__()
        self.model = model
        self._group = strategy.sp_group
        self.sees = is_vision_language(model.config)
        dtype = model.dtype if model.dtype != torch.float32 else strategy.precision_plugin.compute_dtype
        use_packed_attention(self.decoder, kernel, strategy.root_device, self._group, dtype)  # type: ignore[arg-type]
        if self.sees:
            if kernel.startswith("flash_attention"):
                self.backbone.visual.set_attn_implementation(kernel)  # type: ignore[union-attr,operator]
            shard_tower(self.backbone.visual, strategy)

    @property
    def backbone(self) -> nn.Module:
        return self.model.base_model  # type: ignore[return-value]

    @property
    def decoder(self) -> nn.Module:
        """The backbone, of a vision-language model its language model."""
        return self.backbone.language_model if self.sees else self.backbone  # type: ignore[return-value]

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size  # type: ignore[union-attr,operator]

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: transformers names the modules that must not be split."""
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        return [m for m in self.decoder.modules() if type(m).__name__ in names]

    def hidden_rows(self, packed: Packed) -> Float[Tensor, "R h"]:
        """Final hidden states at this rank's response positions."""
        output = self.decoder(
            **self.inputs(packed),
            use_cache=False,
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_length,
            max_length_k=packed.max_length,
        )
        return output.last_hidden_state[0].index_select(0, packed.rows)

    def inputs(self, packed: Packed) -> dict[str, Tensor]:
        """This rank's piece of the stream, as the decoder takes it."""
        if self.sees:
            return merged_inputs(self.backbone, packed, self._group)
        if packed.images is not None:
            raise ValueError(
                f"the prompts have images, {type(self.model).__name__} is a text model: take another critic"
            )
        return {
            "input_ids": shard_sequence(packed.input_ids, self._group)[None],
            "position_ids": shard_sequence(packed.position_ids, self._group)[None],
        }

    def align(self, values: Float[Tensor, "R"], packed: Packed) -> Float[Tensor, "b T"]:
        """Values at this rank's response positions -> response-aligned, gathered over the sequence-parallel group."""
        piece = len(packed.input_ids) // group_size(self._group)
        stream = values.new_zeros(piece).index_copy(0, packed.rows, values)
        return packed.unpack(gather_sequence(stream, self._group))


class Policy(_PackedModel):
    """The actor or the reference.

    ``forward(packed, temperature, with_entropy)`` returns log-probs of the response tokens and entropies of their
    distributions (0 without ``with_entropy``), float32, (b, T).
    """

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, kernel: str = "auto") -> None:
        super().__init__(model, strategy, kernel)
        self._head = [LogProbHead.replace(model)]  # in a list: it is a submodule of the model already

    def forward(self, packed: Packed, temperature: float, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        labels = shard_sequence(packed.labels, self._group).index_select(0, packed.rows)
        log_probs, entropy = self._head[0](self.hidden_rows(packed), labels, temperature, with_entropy)
        return self.align(log_probs, packed), self.align(entropy, packed)

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(transformers name, shard) pairs; a tied parameter comes under each of its names."""
        yield from self.model.named_parameters(remove_duplicate=False)

    @property
    def units(self) -> list[nn.Module]:
        """FSDP groups besides the root; a tied embedding stays in the root's."""
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        untied = [] if self._head[0].weight is embedding.weight else [self._head[0], embedding]
        return self.layers + untied


class Critic(_PackedModel):
    """A backbone with a value head; ``forward(packed)`` returns values of the states before each response token, (b, T).

    The head is float32 with float32 output: bfloat16 steps near 1 are 0.008, coarser than the advantages.
    """

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, kernel: str = "auto") -> None:
        super().__init__(model, strategy, kernel)
        self.value_head = nn.Linear(self.hidden_size, 1, dtype=torch.float32)

    @property
    def backbone(self) -> nn.Module:
        return self.model

    def forward(self, packed: Packed) -> Float[Tensor, "b T"]:
        return self.align(self.value_head(self.hidden_rows(packed)).squeeze(-1).float(), packed)

    @property
    def units(self) -> list[nn.Module]:
        return self.layers


def build_policy(settings: ModelSettings, strategy: FSDPUlyssesStrategy, *, frozen: bool = False) -> Policy:
    """The actor, or with ``frozen`` a reference in bfloat16 without gradients."""
    dtype = torch.bfloat16 if frozen else strategy.precision_plugin.param_dtype
    with meta_parameters():
        model = _causal_lm(settings, dtype, strategy)
    policy = Policy(model, strategy, settings.attention)
    if settings.gradient_checkpointing and not frozen:
        _checkpoint_layers(model)
    strategy.shard(policy, policy.units, frozen=frozen)
    strategy.materialize(policy)
    model.tie_weights()  # type: ignore[operator]  # allocating visits each name on its own
    load_pretrained(policy, settings, strategy, lambda name: name.removeprefix("model."))
    return policy.eval() if frozen else policy.train()


def build_critic(settings: ModelSettings, strategy: FSDPUlyssesStrategy) -> Critic:
    """A critic whose backbone starts from ``settings.path`` and whose values start at 0."""
    with meta_parameters():
        causal = _causal_lm(settings, strategy.precision_plugin.param_dtype, strategy)
        critic = Critic(causal.base_model, strategy, settings.attention)  # type: ignore[arg-type]
    prefix = f"{causal.base_model_prefix}."
    if settings.gradient_checkpointing:
        _checkpoint_layers(critic.model)
    strategy.shard_float32(critic.value_head)
    strategy.shard(critic, critic.units)
    strategy.materialize(critic)
    load_pretrained(critic, settings, strategy, lambda name: prefix + name.removeprefix("model."), ("value_head.",))
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.zero_()
    return critic.train()


def _causal_lm(settings: ModelSettings, dtype: torch.dtype, strategy: FSDPUlyssesStrategy) -> nn.Module:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    check_packable(config, strategy.sequence_parallel_size)
    for holder in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(holder, "output_router_logits", False):
            raise NotImplementedError(
                "output_router_logits adds an auxiliary loss that is not trained here: set it to false"
            )
        for name, value in holder.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(holder, name, 0.0)  # log-probs of rollout and update must be of one distribution
    sees = is_vision_language(config)
    if not sees and not settings.freeze_vision:
        raise ValueError(
            f"model.freeze_vision: false needs a vision-language model, {config.model_type} takes text only"
        )
    model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    model.tie_weights()
    if sees and settings.freeze_vision:
        freeze(model.base_model.visual, dtype if dtype != torch.float32 else strategy.precision_plugin.compute_dtype)
    return model


def _checkpoint_layers(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
