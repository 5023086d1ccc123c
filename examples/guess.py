"""A task of several turns: find a number from 1 to 99 by what is said to each guess.

python examples/demo/prepare.py models/smollm2-135m
lightning-rlhf fit --config configs/grpo_guess.yaml
"""

from __future__ import annotations

import re
from typing import Any

_TASK = "I think of a number from 1 to 99. Guess it, say nothing but a number each time, and I say higher or lower."
_ANOTHER = "I think of another number from 1 to 99."
_PLAYED = ((37, (50, 25, 37)), (81, (50, 75, 88, 81)))
"""Games that a prompt shows, (number, guesses): a small model does not answer with numbers before it has seen some."""


def rows() -> list[dict[str, Any]]:
    """All numbers."""
    shown: list[dict[str, str]] = []
    for number, guesses in _PLAYED:
        say: str | None = _ANOTHER if shown else _TASK
        for guessed in map(str, guesses):
            shown += [{"role": "user", "content": str(say)}, {"role": "assistant", "content": guessed}]
            say = reply([guessed], number)
    prompt = [*shown, {"role": "user", "content": _ANOTHER}]
    return [{"prompt": prompt, "number": number} for number in range(1, 100)]


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
    """1 if the last guess is right."""
    return [float(guess(own[-1]) == wanted) for own, wanted in zip(turns, number, strict=True)]


def near(turns: list[list[str]], number: list[int], **_: Any) -> list[float]:
    """Up to 1 by how near the last guess came: a wrong one teaches something, too."""
    last = [guess(own[-1]) for own in turns]
    return [0.0 if said is None else 1 / (1 + abs(said - wanted)) for said, wanted in zip(last, number, strict=True)]
