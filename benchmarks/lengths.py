"""How long each response is: the same on every side of a comparison, whoever samples it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """``longest`` at most, log-normal around ``median`` with deviation ``sigma`` of the logarithm; 0 is one length for all.

    ``Lengths(...)(iteration, index)`` is the number of tokens of a response, a function of nothing else; ``index`` counts the
    responses of an iteration over all data ranks, prompt-major.
    """

    median: float
    sigma: float
    longest: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Of ``fixed:LENGTH`` or ``lognormal:MEDIAN,SIGMA,LONGEST``.

        Raises:
            ValueError: it is neither, or a number is out of range.
        """
        kind, _, numbers = text.partition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
            median, sigma, longest = {"fixed": (*values, 0.0, *values), "lognormal": values}[kind]
        except (KeyError, ValueError):
            raise ValueError(f"lengths must be fixed:LENGTH or lognormal:MEDIAN,SIGMA,LONGEST, got {text!r}") from None
        if not (1 <= median <= longest and sigma >= 0 and longest == int(longest)):
            raise ValueError(f"lengths must have 1 <= median <= longest, a whole number, and sigma >= 0, got {text!r}")
        return cls(median, sigma, int(longest))

    def __call__(self, iteration: int, index: int) -> int:
        z = random.Random(f"{self}/{iteration}/{index}").gauss(0.0, 1.0)
        return min(self.longest, max(1, round(self.median * math.exp(self.sigma * z))))
