"""The vision tower of a vision-language model in packed, sequence-sharded training.

    patches ── visual (every rank of a sequence-parallel group) ──▶ features ─┐
    token ids, this rank's piece ── embedding ──▶ (S/P, h) ── index_copy ◀────┘──▶ language model, packed attention

The tower runs in every micro-batch, on one blank feature where there is no picture: its shards are gathered by collectives,
which all ranks must enter. It keeps the attention that transformers gives it; only the language model's is packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.images import PackedImages, is_vision_language
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import Packed
from lightning_rlhf.ulysses import shard_sequence

if TYPE_CHECKING:
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


def check_vision(config: Any, settings: ModelSettings) -> None:
    """Refuse settings that do not go with the kind of model that ``config`` is of.

    Raises:
        ValueError: there is no vision tower to train.
        NotImplementedError: the setting is for text models only.
    """
    if not is_vision_language(config):
        if not settings.freeze_vision:
            raise ValueError(
                f"model.freeze_vision: false needs a vision-language model, {config.model_type} takes text only"
            )
        return
    if settings.liger:
        raise NotImplementedError(
            f"model.liger is for text models, {config.model_type} is a vision-language model: set it to false"
        )
    if settings.lora is not None and not settings.freeze_vision:
        raise NotImplementedError(
            "model.freeze_vision must be true with model.lora: adapters are the language model's, and the rest stays as it is"
        )


def freeze(visual: nn.Module, dtype: torch.dtype) -> None:
    """No gradients, and ``dtype`` for the parameters (the rotary frequencies are buffers and stay as they are)."""
    for parameter in visual.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def shard_tower(visual: Any, strategy: FSDPUlyssesStrategy, on_host: bool = False) -> None:
    """Every block an FSDP unit, the rest of the tower another; ``on_host`` as in `FSDPUlyssesStrategy.shard`."""
    for unit in (*visual.blocks, visual):
        strategy.shard_uncast(unit, on_host)


def merged_inputs(backbone: Any, packed: Packed, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The language model's ``inputs_embeds`` (1, S/P, h) and ``position_ids`` for this rank's piece of the stream."""
    embeds = backbone.get_input_embeddings()(shard_sequence(packed.input_ids, group))
    images = packed.images
    features = _features(backbone.visual, images, embeds.device)
    if images is None:
        if features.requires_grad:  # the backward pass has collectives, too
            embeds = embeds + 0.0 * features.sum().to(embeds.dtype)
        return {"inputs_embeds": embeds[None], "position_ids": shard_sequence(packed.position_ids, group)[None]}
    shown = features.index_select(0, images.sources).to(embeds.dtype)
    embeds = embeds.index_copy(0, images.slots, shown)
    return {"inputs_embeds": embeds[None], "position_ids": shard_sequence(images.position_ids, group).T[:, None]}


def _features(visual: Any, images: PackedImages | None, device: torch.device) -> Float[Tensor, "F h"]:
    """The tower's output for all pictures; without any, for a blank one of the smallest size.

    ``device`` computes; an offloaded tower's own parameters may be on the host.
    """
    config, merge, weight = visual.config, visual.spatial_merge_size, next(visual.parameters())
    if images is None:
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        patches = torch.zeros(merge**2, width, device=device)
        grid = torch.tensor([[1, merge, merge]], device=device)
    else:
        patches, grid = torch.cat(images.pixel_values).to(device, non_blocking=True), images.grid_thw
    with torch.set_grad_enabled(torch.is_grad_enabled() and weight.requires_grad):
        return visual(patches, grid_thw=grid).pooler_output


def original_name(name: str) -> str:
    """A parameter's name in the checkpoints that the Qwen2-VL families were published with."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
