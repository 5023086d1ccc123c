"""Metrics of one iteration, gathered on the device and reduced once.

`Metrics` keeps tensors on the device and never waits for it. `Metrics.reduce` packs them into two vectors, one to be
summed over ranks and one to be maximised, and copies the result to the host in a single transfer:

    sum   [Σ w·x, Σ w  per mean …, Σ x  per sum …]
    max   [max x …]

Constraint: every rank must hold the same names, since the vectors are packed by position (names are sorted, so the
order of the calls does not matter). A rank that has nothing to say adds a mean of weight 0, a sum of 0 or a maximum
of -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor, str], Tensor]
"""(vector, "sum" | "max") -> the vector reduced over the ranks that hold different data."""


class Metrics:
    """Accumulates weighted means, sums and maxima until `reduce`.

    Args:
        device: where the totals live: the device that the values come from, so that adding one copies nothing.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._means: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor | float, weights: Tensor | float = 1.0) -> None:
        """Add ``values`` to the mean ``name``; shapes broadcast, values of weight 0 may be anything, NaN included."""
        x, w = torch.broadcast_tensors(self._own(values), self._own(weights))
        pair = torch.stack([torch.where(w != 0, x * w, 0).sum(), w.sum()])
        self._means[name] = self._means[name] + pair if name in self._means else pair

    def sum(self, name: str, value: Tensor | float) -> None:
        """Add all elements of ``value`` to the sum ``name``."""
        total = self._own(value).sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def scale(self, names: Iterable[str], factor: float) -> None:
        """Multiply those of the sums ``names`` that there are."""
        for name in self._sums.keys() & set(names):
            self._sums[name] = self._sums[name] * factor

    def max(self, name: str, value: Tensor | float) -> None:
        """Raise the maximum ``name`` to the largest element of ``value``; NaN stays visible. No element, no change."""
        x = self._own(value).flatten()
        highest = torch.cat([x, x.new_full((1,), float("-inf"))]).amax()
        self._maxima[name] = torch.maximum(self._maxima[name], highest) if name in self._maxima else highest

    def reduce(self, all_reduce: AllReduce | None = None) -> dict[str, float]:
        """All metrics over all ranks, as numbers; equal on every rank. Means without any weight are left out.

        Args:
            all_reduce: called once with "sum" and once with "max" (not at all for a kind that has no names);
                None for a single process.

        Raises:
            ValueError: a name used for two kinds.
        """
        means, sums, maxima = sorted(self._means), sorted(self._sums), sorted(self._maxima)
        if len({*means, *sums, *maxima}) < len(means) + len(sums) + len(maxima):
            twice = [n for n in {*means, *sums, *maxima} if (n in means) + (n in sums) + (n in maxima) > 1]
            raise ValueError(f"a metric is a mean, a sum or a maximum, not two of them: {', '.join(sorted(twice))}")
        added = [*(self._means[n] for n in means), *(self._sums[n][None] for n in sums)]
        raised = [self._maxima[n][None] for n in maxima]
        packed = []
        for parts, how in ((added, "sum"), (raised, "max")):
            if parts:
                vector = torch.cat(parts)
                packed.append(vector if all_reduce is None else all_reduce(vector, how))
        if not packed:
            return {}
        numbers = torch.cat(packed).tolist()
        pairs = {n: (numbers[2 * i], numbers[2 * i + 1]) for i, n in enumerate(means)}
        result = {n: total / weight for n, (total, weight) in pairs.items() if weight}
        return result | dict(zip([*sums, *maxima], numbers[2 * len(means) :], strict=True))

    def _own(self, x: Tensor | float) -> Tensor:
        tensor = x.detach() if isinstance(x, Tensor) else torch.tensor(x)
        return tensor.to(self.device, self.dtype, non_blocking=True)
