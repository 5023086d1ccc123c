"""A Qwen2 of a standard shape with random weights and a byte tokenizer: for speed, where no weights can be had.

python benchmarks/random_model.py 1.5b /tmp/qwen2-1.5b
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from lightning_rlhf.tiny import write_byte_tokenizer

# hidden, layers, heads, kv heads, intermediate, vocabulary, tied embeddings
SHAPES = {
    "tiny": (64, 2, 2, 1, 128, 512, True),
    # as many layers as SmolLM2-135M: what a layer costs beside its arithmetic
    "narrow": (64, 30, 2, 1, 128, 512, True),
    "small": (256, 4, 8, 2, 688, 4096, False),
    "135m": (576, 30, 9, 3, 1536, 49152, True),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
}


def config_of(shape: str, positions: int = 32768) -> Any:
    """The transformers config of a shape."""
    from transformers import Qwen2Config

    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = SHAPES[shape]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def write(shape: str, folder: str) -> None:
    """Write the folder."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = config_of(shape)
    write_byte_tokenizer(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", help="to write")
    arguments = parser.parse_args()
    write(arguments.shape, arguments.folder)
