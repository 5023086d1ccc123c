"""Numbers of a configuration that are finite: what jsonargparse calls a positive float may be infinite."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeAlias

from jsonargparse.typing import restricted_number_type

if TYPE_CHECKING:
    Finite: TypeAlias = float
    NonNegativeFloat: TypeAlias = float
    PositiveFloat: TypeAlias = float
else:
    Finite = restricted_number_type("Finite", float, [(">", -inf), ("<", inf)])
    NonNegativeFloat = restricted_number_type("FiniteNonNegative", float, [(">=", 0), ("<", inf)])
    PositiveFloat = restricted_number_type("FinitePositive", float, [(">", 0), ("<", inf)])
