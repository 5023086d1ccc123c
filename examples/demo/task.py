"""The demo's task: adding two numbers, which the model half knows and a rule can check.

    prompt   "7+6=13\\n12+9="     one worked example, then the question; 11 to 13 tokens
    answer   "21"                 scored by `lightning_rlhf.rewards.first_number`

SmolLM2-135M-Instruct answers about a fifth of these right when it samples at temperature 1. Both operands run from 1 to
24. A pair is held out in both orders, so no held-out sum was trained on the other way round.

    python examples/demo/task.py FOLDER      writes train.jsonl and heldout.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
from itertools import combinations_with_replacement
from pathlib import Path

LARGEST = 24
HELD_OUT = 200
EXAMPLE = (7, 6)


def row(a: int, b: int) -> dict[str, str]:
    """One line of the data: ``prompt`` and the ``answer`` that the reward function gets as a column."""
    x, y = EXAMPLE
    return {"prompt": f"{x}+{y}={x + y}\n{a}+{b}=", "answer": str(a + b)}


def split(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training rows, held-out rows): the same on every machine, disjoint, without the worked example."""
    pairs = [p for p in combinations_with_replacement(range(1, LARGEST + 1), 2) if set(p) != set(EXAMPLE)]
    order = random.Random(seed)
    order.shuffle(pairs)
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for a, b in pairs:
        part = held_out if len(held_out) < HELD_OUT else train
        part.extend(row(x, y) for x, y in sorted({(a, b), (b, a)}))
    for part in (train, held_out):
        order.shuffle(part)
    return train, held_out


def write(rows: list[dict[str, str]], path: Path) -> None:
    """JSON lines, whole or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    os.replace(draft, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's prompts.")
    parser.add_argument("folder", type=Path, help="where train.jsonl and heldout.jsonl go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split()
    write(train, folder / "train.jsonl")
    write(held_out, folder / "heldout.jsonl")
    print(f"{folder}: {len(train)} training prompts, {len(held_out)} held out")


if __name__ == "__main__":
    main()
