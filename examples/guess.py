"""A task of several turns: find a number from 1 to 99 by what is said to each guess.

lightning-rlhf fit --config configs/grpo_guess.yaml
"""

from __future__ import annotations

import re
from typing import Any

_TASK = "I think of a number from 1 to 99. Guess it, say nothing but a number each time, and I say higher or lower."


def rows() -> list[dict[str, Any]]:
    """All numbers."""
    return [{"prompt": [{"role": "user", "content": _TASK}], "number": number} for number in range(1, 100)]


def guess(turn: str) -> int | None:
    """The first number that a turn names."""
    found = re.search(r"\d+", turn)
    return int(found[0]) if found else None


def reply(turns: list[str], number: int) -> str | None:
    """What the last guess is answered with; None once it is right."""
    said = guess(turns[-1])
    if said is None:
        return "That is no number."
    return None if said == number else "higher" if said < number else "lower"


def solved(turns: list[list[str]], number: list[int], **_: Any) -> list[float]:
    """1 if the last guess is right, else how near it came: up to 0.5."""
    last = [guess(own[-1]) for own in turns]
    return [
        0.0 if said is None else 1.0 if said == wanted else 0.5 / (1 + abs(said - wanted))
        for said, wanted in zip(last, number, strict=True)
    ]
