"""``random:tiny``: a small random model with a byte tokenizer, for tests, CI and a first run without network.

It is written once to the user's cache (``$LIGHTNING_RLHF_CACHE`` or ``~/.cache/lightning_rlhf``) as an ordinary Hugging Face
folder and is the same on every machine. head_dim is 32 because the attention kernels of vLLM's CPU backend start there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

TINY = "random:tiny"
PAD, EOS = "<|endoftext|>", "<|im_end|>"
"""Qwen's own: transformers gives a Qwen2 its tokenizer class, which would add them otherwise."""

_VERSION = "3"

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def sums() -> list[dict[str, str]]:
    """Prompts for the tiny model: all sums of two digits."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model gets some of: 0.04 at first."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def cache_folder() -> Path:
    """Of this package, on this machine."""
    return Path(os.environ.get("LIGHTNING_RLHF_CACHE", "~/.cache/lightning_rlhf")).expanduser()


def tiny_model(cache: Path | None = None) -> Path:
    """Write the model if it is not there yet; safe when several processes do so at once (the folder appears whole)."""
    root = cache or cache_folder()
    target = root / f"random-tiny-{_VERSION}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=root, prefix=".random-tiny-"))
    try:
        _write(draft)
        try:
            draft.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def write_byte_tokenizer(folder: Path | str) -> dict[str, int]:
    """Save a tokenizer with one token per byte and a chat template; returns its vocabulary, `PAD` 0 and `EOS` 1."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, EOS]
    vocab = {t: i for i, t in enumerate(special)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=PAD, chat_template=_CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return vocab


def _write(folder: Path) -> None:
    """Part by part: a model's ``save_pretrained`` writes on the first rank only, and here each rank has a draft of its own."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    vocab = write_byte_tokenizer(folder)
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=vocab[PAD],
        eos_token_id=vocab[EOS],
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    config.save_pretrained(folder)
    GenerationConfig(pad_token_id=vocab[PAD], eos_token_id=vocab[EOS]).save_pretrained(folder)
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
