"""Pictures in prompts, for models of the Qwen2-VL and Qwen2.5-VL families.

    row ── pictures_of ──▶ files, bytes, PIL ── sizes ──▶ ImageEncoder.expand     one placeholder token per merged patch
                                             ── pixels ─▶ ImageEncoder.__call__ ─▶ PromptImages ── pack_images ──▶ PackedImages

A picture is cut into patches of p x p pixels, h x w of them; the vision tower makes one feature of m x m neighbouring patches,
which takes the place of a placeholder's embedding. Rotary positions have three components (temporal, height, width). Text
counts all three up together; the features of a picture at position s have (s, s + row, s + column), and the text behind it goes
on at s + max(h, w) / m. Source: Qwen2-VL, Wang et al. 2024, arXiv:2409.12191, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.types import Movable, PromptImages

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""``model_type`` of the vision-language models that can be trained."""

COLUMNS = ("images", "image")
"""Columns of a row that may hold its pictures."""


def is_vision_language(config: Any) -> bool:
    """Whether a model takes pictures, from its transformers config.

    Raises:
        NotImplementedError: it does, and is of another family than those that can be trained.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    own_code = getattr(config, "auto_map", None) or {}
    images = getattr(config, "vision_config", None) is not None or "AutoModelForImageTextToText" in own_code
    if not images and not (config.model_type in NAMES and config.sub_configs):
        return False
    if config.model_type not in FAMILIES:
        raise NotImplementedError(
            f"{config.model_type} is a vision-language model of a family that cannot be trained yet: take one of"
            f" {', '.join(FAMILIES)}, or a text model"
        )
    return True


def auto_class(config: Any) -> Any:
    """The transformers class that builds the model of ``config``, with its language-model head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


# -- rows ----------------------------------------------------------------------------------------------------------------


def pictures_of(row: Mapping[str, Any]) -> list[Any]:
    """What a row's column ``images`` (a list) or ``image`` (one) holds, as it is stored."""
    for column in COLUMNS:
        value = row.get(column)
        if value is not None:
            return list(value) if isinstance(value, list | tuple) else [value]
    return []


def has_image_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message's content has ``{"type": "image"}`` among its parts."""
    contents = [m.get("content") for m in messages]
    return any(part.get("type") == "image" for c in contents if isinstance(c, list) for part in c)


def with_image_parts(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The conversation with ``count`` image parts at the start of its first user message, if it has none of its own."""
    if not count or has_image_parts(messages):
        return messages
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise ValueError("has images but no user message to put them in")
    content = messages[first].get("content") or []
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    shown = messages[first] | {"content": [{"type": "image"}] * count + text}
    return [*messages[:first], shown, *messages[first + 1 :]]


def open_picture(stored: Any) -> Any:
    """A PIL image, not decoded yet.

    Args:
        stored: a PIL image, encoded bytes, a path, or the ``{"bytes": …, "path": …}`` of `datasets`.

    Raises:
        ValueError: it is none of these, or cannot be read.
    """
    from PIL import Image

    source = stored
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        return source
    if not isinstance(source, bytes | str | Path):
        raise ValueError(f"must be a PIL image, bytes or a path, got {type(stored).__name__}")
    try:
        encoded = BytesIO(source if isinstance(source, bytes) else Path(source).read_bytes())
        return Image.open(encoded)
    except Image.UnidentifiedImageError as error:
        raise ValueError("is in no format that Pillow reads") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error


@dataclass(frozen=True)
class ImageEncoder:
    """Turns the pictures of a prompt into what the vision tower takes.

    Args:
        processor: the model's own image processor from transformers.
        token_id: the placeholder in the token ids.
        merge: patches per side that make one feature.
        max_pixels: larger pictures are scaled down to this many before the processor, or an engine's own, gets them.
    """

    processor: Any
    token_id: int
    merge: int
    max_pixels: int | None = None

    @classmethod
    def load(cls, path: str, trust_remote_code: bool = False) -> ImageEncoder | None:
        """Of the model in folder ``path``; None for a text model."""
        from transformers import AutoConfig, AutoImageProcessor

        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if not is_vision_language(config):
            return None
        if find_spec("PIL") is None:
            raise ImportError(f"{config.model_type} needs Pillow: pip install 'lightning-rlhf[vision]'")
        processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        return cls(processor, config.image_token_id, config.vision_config.spatial_merge_size)

    def lengths(self, stored: Iterable[Any]) -> list[int]:
        """Features of each picture, from its size alone.

        Raises:
            ValueError: a picture that cannot be read, or is too narrow.
        """
        out = []
        for number, one in enumerate(stored):
            try:
                width, height = self._size(open_picture(one))
                patches = self.processor.get_number_of_image_patches(height, width, {})
            except ValueError as error:
                raise ValueError(f"cannot be shown: image {number} {error}") from error
            out.append(int(patches) // self.merge**2)
        return out

    def expand(self, ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Repeat each placeholder as often as its picture has features.

        Raises:
            ValueError: there are more placeholders than pictures, or fewer.
        """
        found = sum(i == self.token_id for i in ids)
        if found != len(lengths):
            raise ValueError(
                f"has {found} image placeholders and {len(lengths)} images: give one {{'type': 'image'}} part, or none at"
                " all, per entry of the row's images"
            )
        counts = iter(lengths)
        return [t for i in ids for t in ([i] * next(counts) if i == self.token_id else [i])]

    def __call__(self, ids: Sequence[int], stored: Sequence[Any]) -> PromptImages:
        """Decode and process the pictures of a prompt with expanded ``ids``.

        Raises:
            ValueError: a picture that cannot be read.
        """
        pictures = []
        for number, one in enumerate(stored):
            try:
                pictures.append(self._decoded(open_picture(one)))
            except (ValueError, OSError) as error:  # the latter from a file that ends too early
                raise ValueError(f"cannot be shown: image {number} {error}") from error
        patches = self.processor(images=pictures, return_tensors="pt")
        grid: Tensor = patches["image_grid_thw"]
        slots = (torch.tensor(ids) == self.token_id).nonzero().squeeze(-1)
        lengths = tuple((grid.prod(-1) // self.merge**2).tolist())
        assert sum(lengths) == len(slots), "the processor's own count of patches differs from what it makes"
        return PromptImages(
            pixel_values=patches["pixel_values"],
            grid_thw=grid,
            slots=slots,
            positions=rotary_positions(len(ids), slots, grid, self.merge),
            lengths=lengths,
            pictures=tuple(pictures),
        )

    def _size(self, picture: Any) -> tuple[int, int]:
        """Width and height, upright and scaled."""
        width, height = picture.size if _orientation(picture) < 5 else reversed(picture.size)
        scale = min(1.0, math.sqrt((self.max_pixels or math.inf) / (width * height)))
        return max(1, round(width * scale)), max(1, round(height * scale))

    def _decoded(self, picture: Any) -> Any:
        """Upright, RGB and scaled, once: engines that process pictures treat transparency in ways of their own."""
        from PIL import ImageOps

        size = self._size(picture)
        upright = (picture if _orientation(picture) == 1 else ImageOps.exif_transpose(picture)).convert("RGB")
        return upright if upright.size == size else upright.resize(size)


def _orientation(picture: Any) -> int:
    """The EXIF value: 1 is upright, from 5 on width and height are exchanged."""
    if picture.format == "PNG" and "exif" not in picture.info:
        return 1  # asking would decode the pixels, in case that it comes behind them
    return picture.getexif().get(0x0112, 1)


# -- token ids and positions ---------------------------------------------------------------------------------------------


def rotary_positions(
    length: int, slots: Int[Tensor, "F"], grid_thw: Int[Tensor, "I 3"], merge: int
) -> Int[Tensor, "L 3"]:
    """(temporal, height, width) of each token of a prompt; the equation is in the module's docstring."""
    out = torch.empty(length, 3, dtype=torch.long)
    token = position = seen = 0
    for frames, rows, columns in grid_thw.tolist():
        rows, columns = rows // merge, columns // merge
        features, start = frames * rows * columns, int(slots[seen])
        out[token:start] = position + torch.arange(start - token)[:, None]
        position += start - token
        token = start + features
        cells = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns))
        out[start:token] = position + cells
        position += max(rows, columns)
        seen += features
    out[token:] = position + torch.arange(length - token)[:, None]
    return out


def continued(positions: Int[Tensor, "L 3"], length: int) -> Int[Tensor, "L2 3"]:
    """Positions of a prompt followed by text, up to ``length`` tokens in all."""
    behind = positions.max() + 1 + torch.arange(length - len(positions))
    return torch.cat([positions, behind[:, None].expand(-1, 3)])


def collapsed(ids: Sequence[int], images: PromptImages | None) -> list[int]:
    """Token ids with one placeholder per picture: what engines that expand themselves take, and what people read."""
    if images is None:
        return list(ids)
    firsts = {int(slots[0]) for slots in images.slots.split(list(images.lengths))}
    dropped = set(images.slots.tolist()) - firsts
    return [token for i, token in enumerate(ids) if i not in dropped]


# -- batches -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedImages(Movable):
    """The pictures of a packed stream of S tokens; each prompt's once, however many responses the stream has to it.

    ``slots`` are the places of features in this sequence rank's piece of the stream, ``sources`` the rows of the vision tower's
    output that go there. The patches stay on the host until the tower runs: a list of micro-batches shares them.
    """

    position_ids: Int[Tensor, "S 3"]
    slots: Int[Tensor, "K"]
    sources: Int[Tensor, "K"]
    grid_thw: Int[Tensor, "I 3"]
    pixel_values: tuple[Float[Tensor, "patches d"], ...]


def pack_images(
    images: Sequence[PromptImages | None],
    lengths: Sequence[int],
    positions: Int[Tensor, "S"],
    sequence_ranks: int = 1,
    sequence_rank: int = 0,
) -> PackedImages | None:
    """Pictures of the sequences of a stream, None if there are none.

    Args:
        images: of each sequence's prompt.
        lengths: of the sequences, prompt and response.
        positions: of the stream's tokens, as if all were text.
        sequence_ranks: ranks that share the stream, each a contiguous piece.
        sequence_rank: this one.
    """
    distinct = {id(one): one for one in images if one is not None}
    if not distinct:
        return None
    first_feature: dict[int, int] = {}
    features = 0
    for key, one in distinct.items():
        first_feature[key] = features
        features += len(one.slots)
    position_ids = positions[:, None].repeat(1, 3)
    slots, sources, start = [], [], 0
    for maybe, length in zip(images, lengths, strict=True):
        if maybe is not None:
            position_ids[start : start + length] = continued(maybe.positions, length)
            slots.append(start + maybe.slots)
            sources.append(first_feature[id(maybe)] + torch.arange(len(maybe.slots)))
        start += length
    all_slots, all_sources = torch.cat(slots), torch.cat(sources)
    piece = len(positions) // sequence_ranks
    own = all_slots // piece == sequence_rank
    return PackedImages(
        position_ids=position_ids,
        slots=all_slots[own] - sequence_rank * piece,
        sources=all_sources[own],
        grid_thw=torch.cat([one.grid_thw for one in distinct.values()]),
        pixel_values=tuple(one.pixel_values for one in distinct.values()),
    )


def prefill_inputs(
    prompts: Sequence[tuple[int, PromptImages | None]], begin: int, device: torch.device
) -> dict[str, Tensor]:
    """What transformers needs to prefill left-padded prompts, of which ``begin`` tokens (all text) are in the cache.

    Args:
        prompts: length and pictures of each.
    """
    width = max(length for length, _ in prompts) - begin
    position_ids = torch.zeros(3, len(prompts), width, dtype=torch.long)
    for row, (length, images) in enumerate(prompts):
        own = torch.arange(length)[:, None].expand(-1, 3) if images is None else images.positions
        position_ids[:, row, width - (length - begin) :] = own[begin:].T
    shown = [images for _, images in prompts if images is not None]
    return {
        "position_ids": position_ids.to(device),
        "pixel_values": torch.cat([images.pixel_values for images in shown]).to(device),
        "image_grid_thw": torch.cat([images.grid_thw for images in shown]).to(device),
    }
