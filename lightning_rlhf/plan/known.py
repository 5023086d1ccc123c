"""Shapes of common public models, for planning where the hub cannot be reached. Never used to build a model.

Source: the ``config.json`` of each repository on the Hugging Face hub; a test compares the parameter counts with the published
ones.
"""

from __future__ import annotations

from typing import Any

# hidden, layers, heads, key/value heads, head size, MLP width, vocabulary, tied embeddings, positions
_SHAPES = {
    ("qwen2", "Qwen/Qwen2.5-0.5B"): (896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    ("qwen2", "Qwen/Qwen2.5-1.5B"): (1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    ("qwen2", "Qwen/Qwen2.5-3B"): (2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    ("qwen2", "Qwen/Qwen2.5-7B"): (3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    ("qwen2", "Qwen/Qwen2.5-14B"): (5120, 48, 40, 8, 128, 13824, 152064, False, 32768),
    ("qwen2", "Qwen/Qwen2.5-32B"): (5120, 64, 40, 8, 128, 27648, 152064, False, 32768),
    ("qwen3", "Qwen/Qwen3-0.6B"): (1024, 28, 16, 8, 128, 3072, 151936, True, 40960),
    ("qwen3", "Qwen/Qwen3-1.7B"): (2048, 28, 16, 8, 128, 6144, 151936, True, 40960),
    ("qwen3", "Qwen/Qwen3-4B"): (2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    ("qwen3", "Qwen/Qwen3-8B"): (4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    ("qwen3", "Qwen/Qwen3-14B"): (5120, 40, 40, 8, 128, 17408, 151936, False, 40960),
    ("llama", "meta-llama/Llama-3.2-1B"): (2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    ("llama", "meta-llama/Llama-3.2-3B"): (3072, 28, 24, 8, 128, 8192, 128256, True, 131072),
    ("llama", "meta-llama/Llama-3.1-8B"): (4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    ("llama", "meta-llama/Llama-3.1-70B"): (8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    ("llama", "HuggingFaceTB/SmolLM2-135M"): (576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    ("llama", "HuggingFaceTB/SmolLM2-360M"): (960, 32, 15, 5, 64, 2560, 49152, True, 8192),
    ("llama", "HuggingFaceTB/SmolLM2-1.7B"): (2048, 24, 32, 32, 64, 8192, 49152, True, 8192),
}
_BY_NAME = {name: (kind, shape) for (kind, name), shape in _SHAPES.items()}


def known_config(model: str) -> Any | None:
    """A transformers config with the sizes of a public model (its instruction-tuned form too), None if it is not listed."""
    from transformers import AutoConfig

    name = model.removesuffix("-Instruct").removesuffix("-Base")
    if name not in _BY_NAME:
        return None
    kind, (hidden, layers, heads, kv_heads, head_dim, width, vocabulary, tied, positions) = _BY_NAME[name]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=positions,
    )
