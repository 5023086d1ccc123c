"""A model in numbers: built on the meta device from its configuration, and run there once (`plan.probe`). No weights, no GPU.

    parameters      every tensor's shape, and the FSDP units they are gathered in
    activations     what autograd keeps of a forward pass over packed streams

FSDP's gathered parameters are freed after use and do not count among the activations.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_rlhf.hf_config import check_class
from lightning_rlhf.images import auto_class, is_vision_language
from lightning_rlhf.modules.execution import check_layers
from lightning_rlhf.modules.lora import Adapter
from lightning_rlhf.modules.settings import LoRA, ModelSettings
from lightning_rlhf.plan.probe import attention, compiled_bytes, decoder_bytes, liger_modules, tower_bytes
from lightning_rlhf.ulysses import head_plan, set_attention


@dataclass(frozen=True)
class Shape:
    """What memory estimates need to know of a model.

    Args:
        model_class: of transformers.
        sizes: shape of each parameter, tied ones once.
        trained: of those with a gradient: all without LoRA.
        units: parameters of each FSDP group besides the root: layers, and an untied embedding and head.
        layers: decoder layers.
        hidden: width.
        vocabulary: width of the head's output; 0 without a head.
        kv_elements: of the cache, per token, all layers.
        attention_bytes: what attention returns in one layer, per token.
        layer_bytes: kept for backward, per token: the largest layer.
        mlp_bytes: of these, what the MLP keeps besides its input: a tiled one keeps it of one tile; 0 without an MLP.
        saved_bytes: kept for backward, per token: all layers and what is around them, without the head.
        compiled: these are of compiled layers; if not, an upper bound for layers that will be.
        tower_layer_bytes: kept for backward by the largest block of a trained vision tower, per token of an image.
        tower_bytes: the same by all of the tower; 0 if there is none or it is frozen.
        whole: layers, embedding and head are in the root.
    """

    model_class: str
    sizes: tuple[torch.Size, ...]
    trained: tuple[torch.Size, ...]
    units: tuple[int, ...]
    layers: int
    hidden: int
    vocabulary: int
    kv_elements: int
    attention_bytes: int
    layer_bytes: float
    mlp_bytes: float
    saved_bytes: float
    compiled: bool = False
    tower_layer_bytes: float = 0.0
    tower_bytes: float = 0.0
    whole: bool = False

    @property
    def parameters(self) -> int:
        return sum(size.numel() for size in self.sizes)

    @property
    def trained_parameters(self) -> int:
        return sum(size.numel() for size in self.trained)

    @property
    def root(self) -> int:
        """Parameters that stay gathered through forward and backward."""
        return self.parameters - sum(self.units)

    def shard(self, ranks: int) -> int:
        """Elements on one of ``ranks``."""
        return _shard(self.sizes, ranks)

    def trained_shard(self, ranks: int) -> int:
        """Elements with a gradient on one of ``ranks``."""
        return _shard(self.trained, ranks)


def _shard(sizes: tuple[torch.Size, ...], ranks: int) -> int:
    """FSDP2 splits dimension 0 like `torch.chunk` and pads."""
    return sum(-(-size[0] // ranks) * (size.numel() // size[0]) for size in sizes)


def shape_of(
    config: Any,
    dtype: torch.dtype,
    *,
    sequence_ranks: int = 1,
    head: bool = True,
    trust_remote_code: bool = False,
    lora: LoRA | None = None,
    freeze_vision: bool = True,
    liger: bool = False,
    compiled: bool = False,
    min_num_params: int = 0,
    settings: ModelSettings | None = None,
) -> Shape:
    """The shape of a causal language model that computes in ``dtype``.

    Args:
        config: of transformers.
        sequence_ranks: GPUs that share a stream; the saved bytes are per token of one GPU's piece.
        head: False for a critic's backbone, a value head included.
        freeze_vision: the tower of a vision-language model has no gradients.
        liger: with Liger's modules in place of the model's own.
        compiled: layers run as `torch.compile` divides them. With Liger, whose kernels it cannot see into, nothing changes.
        min_num_params: of the strategy: a smaller model is all root.
        settings: switches that its layers must be able to take.

    Raises:
        NotImplementedError: the model is of another vision-language family, cannot attend over packed streams, reads values, or
            has layers that cannot take a switch.
        ValueError: it is no causal language model.
    """
    check_class(config)
    config = deepcopy(config)  # the model keeps it and writes into it
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        backbone = model if head else model.base_model
        value_head = () if head else (torch.Size((1, config.get_text_config().hidden_size)), torch.Size((1,)))
        if lora is not None:
            Adapter(model, lora, dtype, part=None if head else backbone)  # gathered in it, whatever it is stored in
    tower = model.base_model.visual if is_vision_language(config) else None
    if tower is not None and freeze_vision:
        tower.requires_grad_(False)
    decoder = model.base_model if tower is None else model.base_model.language_model
    set_attention(model if tower is None else decoder, f"plan_sp{sequence_ranks}", attention(sequence_ranks))
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in decoder.modules() if type(m).__name__ in names]
    if settings is not None:
        check_layers(model, layers, settings)
    units = list(layers)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if head and output.weight is not embedding.weight:
        units += [output, embedding]
    if whole := _count(backbone) < min_num_params:
        units = []
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    try:
        with liger_modules(model) if liger else nullcontext():
            kept = decoder_bytes(decoder, layers)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be planned, though it may train: its layers read values of tensors, which a model"
            f" without weights has not ({error})"
        ) from error
    traced = compiled_bytes(decoder, layers) if compiled and not liger else None
    tower_kept = None if tower is None or freeze_vision else tower_bytes(tower)
    return Shape(
        model_class=type(model).__name__,
        sizes=(*(p.shape for p in backbone.parameters()), *value_head),
        trained=(*(p.shape for p in backbone.parameters() if p.requires_grad), *value_head),
        units=(*map(_count, units), *_tower_units(tower), *((text.hidden_size + 1,) * (not head))),
        layers=len(layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size if head else 0,
        kv_elements=2 * text.num_hidden_layers * kv_heads * head_dim,
        attention_bytes=_attention_bytes(heads, kv_heads, head_dim, dtype.itemsize, sequence_ranks),
        layer_bytes=(traced or kept).layer,
        mlp_bytes=kept.mlp,
        saved_bytes=(traced or kept).everything,
        compiled=traced is not None,
        tower_layer_bytes=tower_kept.layer if tower_kept else 0.0,
        tower_bytes=tower_kept.everything if tower_kept else 0.0,
        whole=whole,
    )


def _attention_bytes(heads: int, kv_heads: int, head_dim: int, size: int, ranks: int) -> int:
    """Output and float32 log-sum-exp; of several ranks also what the all-to-alls return: q, k, v, and the output once more."""
    if ranks == 1:
        return heads * (head_dim * size + 4)
    repeat, pad = head_plan(heads, kv_heads, ranks)
    exchanged = 2 * (heads + pad) + 2 * (kv_heads * repeat + pad) + heads
    return exchanged * head_dim * size + (heads + pad) * 4


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _tower_units(tower: Any) -> tuple[int, ...]:
    """Each block of a vision tower, and what is around them."""
    if tower is None:
        return ()
    blocks = [_count(block) for block in tower.blocks]
    return (*blocks, _count(tower) - sum(blocks))
