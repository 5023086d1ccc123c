"""Tokenised examples of a whole data set, and the batches taken from it.

rows ─▶ pieces (conversations.py) ─▶ ExampleTable ─▶ Examples
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_rlhf.conversations import Labelled, Piece, tokenise
from lightning_rlhf.images import pictures_of
from lightning_rlhf.prompts import PromptEncoder
from lightning_rlhf.sources import Row, Rows
from lightning_rlhf.types import Examples

_CHUNK = 1024


@dataclass(frozen=True)
class ExampleTable:
    """Tokenised examples, all with the same number of sequences.

    Args:
        examples: the sequences of each.
        margins: of each pair, if the rows have them.
    """

    examples: list[tuple[Labelled, ...]]
    margins: list[float] | None = None

    @classmethod
    def build(
        cls,
        rows: Rows,
        numbers: range,
        encoder: PromptEncoder,
        pieces: Callable[[Row], Sequence[Sequence[Piece]]],
        source: str = "data",
    ) -> ExampleTable:
        """Tokenise the rows ``numbers``.

        Args:
            pieces: of each sequence of a row's example.
            source: of the rows, for errors.

        Raises:
            ValueError: a row that is no example; the first such row is named.
        """
        examples: list[tuple[Labelled, ...]] = []
        margins: list[float | None] = []
        for start in range(0, len(numbers), _CHUNK):
            chunk: list[Sequence[Sequence[Piece]]] = []
            for number in numbers[start : start + _CHUNK]:
                row = rows[number]
                try:
                    if any(not isinstance(one, str) for one in pictures_of(row)):
                        raise ValueError("has images: only rollouts take them")
                    chunk.append(pieces(row))
                    margins.append(None if row.get("margin") is None else _finite(row["margin"]))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{source}: row {number} {error}") from error
            flat = iter(tokenise([sequence for example in chunk for sequence in example], encoder))
            for example in chunk:
                examples.append(tuple(next(flat) for _ in example))
        for number, found in zip(numbers, examples, strict=True):
            if not all(sequence.spans for sequence in found):
                raise ValueError(f"{source}: row {number} has nothing to learn: its answer has no tokens")
        given = [margin for margin in margins if margin is not None]
        if 0 < len(given) < len(margins):
            without = numbers[margins.index(None)]
            raise ValueError(f"{source}: row {without} has no margin and others have: give all rows one, or none")
        return cls(examples, given or None)

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each example's longest sequence."""
        return [max(map(len, example)) for example in self.examples]

    @cached_property
    def fingerprint(self) -> str:
        """Of all token ids in their order, and what of them is learned."""
        digest = hashlib.blake2b(digest_size=8)
        for example in self.examples:
            for sequence in example:
                digest.update(f"{len(sequence)} {sequence.spans}".encode())
                digest.update(sequence.ids)
        return digest.hexdigest()

    def where(self, keep: Sequence[bool]) -> ExampleTable:
        """The examples that ``keep`` says."""
        margins = self.margins and [one for one, kept in zip(self.margins, keep, strict=True) if kept]
        return ExampleTable([one for one, kept in zip(self.examples, keep, strict=True) if kept], margins)

    def take(self, positions: Sequence[int]) -> Examples:
        """The examples at ``positions``."""
        chosen = [self.examples[p] for p in positions]
        flat = [sequence for example in chosen for sequence in example]
        starts = [sequence.spans[0][0] for sequence in flat]
        masks = [torch.zeros(s.spans[-1][1] - at) for s, at in zip(flat, starts, strict=True)]
        for mask, sequence, at in zip(masks, flat, starts, strict=True):
            for start, end in sequence.spans:
                mask[start - at : end - at] = 1.0
        return Examples(
            # nothing is learned from what follows the last span
            sequences=[torch.tensor(s.ids[: s.spans[-1][1]], dtype=torch.long) for s in flat],
            prompt_lengths=starts,
            masks=masks,
            size=len(chosen[0]) if chosen else 1,
            margins=None if self.margins is None else torch.tensor([self.margins[p] for p in positions]),
        )


def _finite(margin: Any) -> float:
    if not math.isfinite(number := float(margin)):
        raise ValueError(f"has a margin of {number}: give a number, or leave it out")
    return number
