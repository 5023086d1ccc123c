"""Small random vision-language models with a byte tokenizer, and rows with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_rlhf.images import ImageEncoder
from lightning_rlhf.prompts import PromptEncoder, PromptTable
from lightning_rlhf.tiny import write_byte_tokenizer
from lightning_rlhf.types import PromptImages

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}


def config_of(family: str, vocabulary: dict[str, int], tied: bool = True) -> Any:
    ids = dict(zip(("vision_start", "vision_end", "image", "video"), (vocabulary[t] for t in SPECIAL), strict=True))
    text = TEXT | {"vocab_size": len(vocabulary), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    shared = {f"{name}_token_id": value for name, value in ids.items()} | {"text_config": text}
    patches = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        vision = patches | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return Qwen2VLConfig(**shared, vision_config=vision, tie_word_embeddings=tied)
    vision = patches | {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(**shared, vision_config=vision, tie_word_embeddings=tied)


def write_vlm(folder: Path, family: str = "qwen2_vl", tied: bool = True, noise: float = 0.05) -> str:
    """An ordinary Hugging Face folder; weights large enough for every token to depend on everything before it."""
    from transformers import AutoModelForImageTextToText, GenerationConfig

    write_byte_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size).save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(family, tokenizer.get_vocab(), tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    return str(folder)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def ask(text: str, images: int = 0) -> list[dict[str, Any]]:
    parts = [{"type": "image"}] * images + [{"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


ROWS: list[dict[str, Any]] = [
    {"prompt": ask("what is it?", 1), "images": [picture(20, 30, 1)]},
    {"prompt": ask("compare them", 2), "images": [picture(40, 16, 2), picture(12, 12, 3)]},
    {"prompt": [{"role": "user", "content": "no picture"}]},
    {"prompt": "say <|vision_start|><|image_pad|><|vision_end|>", "image": picture(64, 10, 4)},
]


def table_of(folder: str, rows: list[dict[str, Any]] = ROWS) -> PromptTable:
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder), vision=ImageEncoder.load(folder))
    return PromptTable.build(rows, range(len(rows)), encoder)


def answered(folder: str) -> list[tuple[Tensor, int, PromptImages | None]]:
    """Prompts of `ROWS` with random answers: all token ids, the prompt's length, its pictures."""
    prompts = table_of(folder).take(range(4))
    generator = torch.Generator().manual_seed(1)
    answers = [torch.randint(3, 258, (n,), generator=generator) for n in (7, 3, 9, 5)]
    assert prompts.images is not None
    return [
        (torch.cat([torch.tensor(ids), answer]), len(ids), images)
        for ids, answer, images in zip(prompts.ids, answers, prompts.images, strict=True)
    ]


def inputs_of(ids: Tensor, images: PromptImages | None) -> dict[str, Tensor]:
    """What a stock model takes beside the token ids."""
    if images is None:
        return {}
    kinds = torch.zeros(1, len(ids), dtype=torch.int)
    kinds[0, images.slots] = 1
    return {"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw, "mm_token_type_ids": kinds}


def rows() -> list[dict[str, Any]]:
    """Eight prompts: six with one or two pictures of different sizes, two without."""
    out = []
    for i in range(8):
        shown = [picture(12 + 8 * i, 40 - 4 * i, i), picture(16, 24, 10 + i)][: (1, 2, 0, 1)[i % 4]]
        out.append({"prompt": ask(f"number {i}?", len(shown)), "images": shown})
    return out
