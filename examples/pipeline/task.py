"""Two-word answers, of which friendly words are preferred: rows for the three steps of examples/pipeline/run.py."""

from __future__ import annotations

import random

NICE, RUDE = ("thanks", "please", "great"), ("ugh", "nope", "meh")
NAMES = ("Ann", "Bob", "Cem", "Dora", "Eve", "Fay", "Gus", "Hal")


def _prompt(name: str) -> str:
    return f"{name}: "


def _answer(rng: random.Random) -> str:
    return " ".join(rng.choice(NICE + RUDE) for _ in range(2))


def friendly(text: str) -> float:
    """Share of the words that are friendly."""
    words = text.split()
    return sum(word in NICE for word in words) / max(1, len(words))


def demonstrations() -> list[dict[str, str]]:
    """What answers look like: either kind of word."""
    rng = random.Random(0)
    return [{"prompt": _prompt(rng.choice(NAMES)), "completion": _answer(rng)} for _ in range(1024)]


def _misspelled(rng: random.Random, text: str) -> str:
    """A piece of it twice, or left out."""
    start = rng.randrange(len(text) - 1)
    end = rng.randrange(start + 1, min(start + 6, len(text)) + 1)
    return text[:start] + rng.choice((text[start:end] * 2, "")) + text[end:]


def pairs() -> list[dict[str, str]]:
    """The friendlier answer is chosen, or the one that is spelled right: what is never rejected, PPO would find."""
    rng, rows = random.Random(1), []
    while len(rows) < 1024:
        better, worse = sorted((_answer(rng), _answer(rng)), key=friendly, reverse=True)
        if len(rows) % 2:
            worse = _misspelled(rng, better)
        if friendly(better) > friendly(worse):
            rows.append({"prompt": _prompt(rng.choice(NAMES)), "chosen": better, "rejected": worse})
    return rows


def prompts() -> list[dict[str, str]]:
    """For rollouts."""
    return [{"prompt": _prompt(name)} for name in NAMES * 4]


def truly_friendly(completions: list[str], **_: object) -> list[float]:
    """What the reward model was meant to learn; its weight in the run is 0: it is only watched."""
    return [friendly(text) for text in completions]
