"""Responses that were sampled once, for every side of a comparison, in whatever order it asks for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path


def write_recorded(path: Path, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> None:
    """Token ids, a prompt for each response."""
    path.write_text(json.dumps(list(zip(prompts, responses, strict=True))))


class Recorded:
    """``Recorded(path)(prompts)`` are the responses to these: a prompt that comes n times gets its first n, in order."""

    def __init__(self, path: str) -> None:
        self._by_prompt: defaultdict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for prompt, response in json.loads(Path(path).read_text()):
            self._by_prompt[tuple(prompt)].append(response)

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        left = {prompt: iter(responses) for prompt, responses in self._by_prompt.items()}
        return [next(left[tuple(prompt)]) for prompt in prompts]
