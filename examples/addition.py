"""Three-shot additions of operands 1 to 99: the learning benchmark of docs/benchmarks.md, as rows for `PromptDataModule`.

data: {path: examples.addition.train, val_path: examples.addition.heldout}      reward: lightning_rlhf.rewards.first_number
"""

from __future__ import annotations

import random

SHOTS = "7 + 5 = 12\n20 + 14 = 34\n3 + 41 = 44\n"
HELD_OUT = 500


def _rows() -> list[dict[str, str]]:
    pairs = [(a, b) for a in range(1, 100) for b in range(1, 100)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"{SHOTS}{a} + {b} =", "answer": str(a + b)} for a, b in pairs]


def heldout() -> list[dict[str, str]]:
    """The 500 pairs that are never trained on."""
    return _rows()[:HELD_OUT]


def train() -> list[dict[str, str]]:
    """The other 9,301 pairs."""
    return _rows()[HELD_OUT:]
