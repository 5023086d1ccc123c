"""Actor and reference as FSDP2 roots, and what `critic` shares with them. Parallelism ends here: nothing above sees a shard.

    forward(packed, …) -> (b, T) tensors aligned with the responses, whole on every rank of a sequence-parallel group

A transformers model is built on the meta device, its attention made packed (`ulysses`), its head replaced (`LogProbHead`), then
sharded, allocated, and every rank reads its own slices of the safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.hf_config import HeadKind, check_class
from lightning_rlhf.images import auto_class, is_vision_language
from lightning_rlhf.modules.execution import apply_execution, bucketed, check_execution
from lightning_rlhf.modules.head import LogProbHead
from lightning_rlhf.modules.loading import load_pretrained, meta_parameters
from lightning_rlhf.modules.lora import Adapter, hf_name
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.startup import check_head, check_isolation
from lightning_rlhf.modules.vision import check_vision, freeze, merged_inputs, shard_tower
from lightning_rlhf.packing import Packed
from lightning_rlhf.ulysses import (
    check_packable,
    gather_sequence,
    group_size,
    position_limit,
    shard_sequence,
    use_packed_attention,
)

if TYPE_CHECKING:
    from lightning_rlhf.precision import FSDP2Precision
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


class PackedModel(nn.Module):
    """A transformers causal LM (or its backbone) over packed, sequence-sharded streams that are on its device."""

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, settings: ModelSettings) -> None:
        super().__init__()
        check_execution(settings, strategy.root_device, model.config)
        self.model = model
        self.adapter: Adapter | None = None
        self._compiled = settings.compile
        self._group = strategy.sp_group
        self.sees = is_vision_language(model.config)
        dtype = model.dtype if model.dtype != torch.float32 else strategy.precision_plugin.compute_dtype
        attending = self.decoder if self.sees else model
        self.attention = use_packed_attention(attending, settings.attention, strategy.root_device, self._group, dtype)  # type: ignore[arg-type]
        if self.sees and settings.attention.startswith("flash_attention"):
            self.backbone.visual.set_attn_implementation(settings.attention)  # type: ignore[union-attr,operator]
        self._position_limit = position_limit(model.config.get_text_config())  # type: ignore[union-attr,operator]

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
        """The decoder layers: transformers names the modules that must not be split, or they are the first list of modules."""
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        # by base classes too: a sharded layer is of a class that FSDP2 derives from its own
        named = [m for m in self.decoder.modules() if names & {kind.__name__ for kind in type(m).__mro__}]
        return named or next((list(m) for m in self.decoder.modules() if isinstance(m, nn.ModuleList)), [])

    def shard(self, strategy: FSDPUlyssesStrategy, *, frozen: bool = False, on_host: bool = False) -> None:
        """Make this an FSDP2 root, see `FSDPUlyssesStrategy.shard`."""
        if self.sees:
            shard_tower(self.backbone.visual, strategy, on_host)
        strategy.shard(self, self.units, self.layers, frozen=frozen, on_host=on_host)  # type: ignore[arg-type]  # of the subclasses

    def inputs(self, packed: Packed) -> dict[str, Any]:
        """Arguments of the decoder, or of the whole transformers model, for this rank's piece of the stream.

        Raises:
            ValueError: a sequence is so long that the rotary embeddings of its neighbours would change, or the stream has
                images and the model takes text only.
        """
        if self._position_limit is not None and packed.max_length > self._position_limit:
            raise ValueError(
                f"a sequence of {packed.max_length} tokens is longer than {self._position_limit}, from where the model's rotary"
                " embeddings depend on what is packed together: lower data.max_prompt_length or"
                " rollout.sampling.max_completion_length"
            )
        longest = bucketed(packed.max_length) if self._compiled else packed.max_length
        return {
            **self._stream(packed),
            "use_cache": False,
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _stream(self, packed: Packed) -> dict[str, Tensor]:
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

    def hidden_rows(self, packed: Packed) -> Float[Tensor, "R h"]:
        """Final hidden states at this rank's response positions."""
        return self.decoder(**self.inputs(packed)).last_hidden_state[0].index_select(0, packed.rows)

    def align(self, values: Float[Tensor, "R"], packed: Packed) -> Float[Tensor, "b T"]:
        """Values at this rank's response positions -> response-aligned, gathered over the sequence-parallel group."""
        piece = len(packed.input_ids) // group_size(self._group)
        stream = values.new_zeros(piece).index_copy(0, packed.rows, values)
        return packed.unpack(gather_sequence(stream, self._group))


class Policy(PackedModel):
    """The actor or the reference.

    ``forward(packed, temperature, with_entropy, with_squares, with_top)`` returns log-probs of the response tokens, entropies of
    their distributions (0 without ``with_entropy``) and, each if asked for, their Σπ² over the vocabulary and where a token is
    the likeliest (1 or 0): float32, (b, T).
    """

    head_kind: HeadKind = "tokens"

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, settings: ModelSettings) -> None:
        super().__init__(model, strategy, settings)
        LogProbHead.replace(model).keep_logits = settings.keep_logits

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[operator]

    def forward(
        self,
        packed: Packed,
        temperature: float,
        with_entropy: bool = False,
        with_squares: bool = False,
        with_top: bool = False,
    ) -> tuple[Tensor, ...]:
        labels = shard_sequence(packed.labels, self._group).index_select(0, packed.rows)
        found = self.head(self.hidden_rows(packed), labels, temperature, with_entropy, with_squares, with_top)
        return tuple(self.align(values, packed) for values in found)

    def stock_log_probs(self, packed: Packed) -> Float[Tensor, "b T"]:
        """Log-probs by the model's own ``forward`` and full logits: what `forward` must give at temperature 1."""
        logits = self.model(**self.inputs(packed)).logits[0].index_select(0, packed.rows)
        labels = shard_sequence(packed.labels, self._group).index_select(0, packed.rows)
        return self.align(logits.float().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1), packed)

    def hf_named_parameters(
        self, value: Callable[[nn.Parameter], Tensor] = lambda p: p
    ) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, shard) pairs, an adapter merged; a tied parameter comes under each of its names.

        Args:
            value: what takes the place of a parameter, see `copies.averages`.
        """
        if self.adapter is not None:
            yield from self.adapter.merged(value)
        else:
            yield from ((name, value(p)) for name, p in self.model.named_parameters(remove_duplicate=False))

    def hf_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, tensor) of what belongs to the weights and is not trained, in its own dtype."""
        yield from ((hf_name(name), buffer) for name, buffer in saved_buffers(self.model))

    @property
    def units(self) -> list[nn.Module]:
        """FSDP groups besides the root; a tied embedding stays in the root's."""
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        untied = [] if self.head.weight is embedding.weight else [self.head, embedding]
        return self.layers + untied


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of those that checkpoints hold."""
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def unsharded_actor(
    settings: ModelSettings, precision: FSDP2Precision, source: str | None = None
) -> tuple[nn.Module, Adapter | None]:
    """The actor's transformers model with its adapter, parameters on the meta device: their names, shapes and dtypes.

    Args:
        source: what an adapter's base is called, if not as in ``settings``.
    """
    with meta_parameters():
        model = causal_lm(settings, stored_dtype(settings, precision), precision)
        LogProbHead.replace(model)
        return model, _adapter(model, settings, precision, source)


def build_policy(
    settings: ModelSettings, strategy: FSDPUlyssesStrategy, *, frozen: bool = False, seed: int = 0
) -> Policy:
    """The actor, or with ``frozen`` a reference in bfloat16 without gradients; ``seed`` is of new adapters."""
    policy = policy_on_meta(settings, strategy, frozen=frozen)
    model = policy.model
    apply_execution(model, policy.layers, settings, strategy.root_device, trained=not frozen)
    on_host = frozen and settings.offload_reference
    policy.shard(strategy, frozen=frozen, on_host=on_host)
    strategy.materialize(policy, on_host=on_host)
    model.tie_weights()  # type: ignore[operator]  # allocating visits each name on its own
    load_pretrained(policy, settings, strategy, lambda name: hf_name(name.removeprefix("model.")), added_names(policy))
    if policy.adapter is not None:
        policy.adapter.start(seed)
    policy.train(not frozen)
    check_isolation(policy, strategy, lambda packed: policy(packed, 1.0)[0], "reference" if frozen else "actor")
    check_head(policy, strategy)
    return policy


def policy_on_meta(settings: ModelSettings, strategy: FSDPUlyssesStrategy, *, frozen: bool) -> Policy:
    with meta_parameters():
        precision = strategy.precision_plugin
        dtype = torch.bfloat16 if frozen else stored_dtype(settings, precision)
        model = causal_lm(settings, dtype, precision)
        policy = Policy(model, strategy, settings)
        if not frozen:
            policy.adapter = _adapter(model, settings, precision)
    return policy


def _adapter(
    model: nn.Module, settings: ModelSettings, precision: FSDP2Precision, source: str | None = None
) -> Adapter | None:
    if settings.lora is None:
        return None
    return Adapter(model, settings.lora, precision.param_dtype, source or settings.source)


def stored_dtype(settings: ModelSettings, precision: FSDP2Precision) -> torch.dtype:
    """Of a trained model's parameters; a frozen base needs no more digits than are computed with."""
    return precision.param_dtype if settings.lora is None else precision.compute_dtype


def added_names(root: PackedModel) -> tuple[str, ...]:
    """Names of the parameters that no checkpoint of the base has."""
    return () if root.adapter is None else tuple(f"model.{name}" for name, _ in root.adapter.named_parameters())


def causal_lm(settings: ModelSettings, dtype: torch.dtype, precision: FSDP2Precision) -> nn.Module:
    """Without any randomness in training mode: log-probs of rollout, old policy and update must be of one distribution."""
    config = deepcopy(settings.config)
    check_packable(config)
    check_class(config, settings.key)
    check_vision(config, settings)
    if settings.lora is not None and getattr(config, "quantization_config", None):
        raise NotImplementedError(
            f"model.lora: the weights of {settings.key} are quantised, their shards cannot be trained on (QLoRA): use the same"
            " model in bfloat16"
        )
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.tie_weights()
    if is_vision_language(config) and settings.freeze_vision:
        freeze(model.base_model.visual, precision.compute_dtype if dtype == torch.float32 else dtype)
    return model
