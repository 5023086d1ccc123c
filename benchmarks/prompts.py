"""Synthetic prompts of an exact number of tokens and a reward that costs nothing, for the speed benchmarks."""

from __future__ import annotations

import random
import string
from typing import Any

LENGTH = 256


def rows(count: int = 4096) -> list[dict[str, Any]]:
    """``count`` prompts of `LENGTH` letters, each of which is one token of `random_model`'s tokenizer."""
    rng = random.Random(0)
    return [{"prompt": "".join(rng.choices(string.ascii_lowercase, k=LENGTH))} for _ in range(count)]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Number of even token ids: varies within a group, so that advantages are not all zero."""
    return [float(sum(t % 2 == 0 for t in ids)) for ids in completion_ids]
