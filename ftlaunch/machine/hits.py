"""How many of a token's experts are found in slots: a stated curve, until it is counted while serving.

Points: share of all experts with a slot; then hits, low, likely and high. At 10 and 25 % the likely ones were counted
by `ft serve` on weights whose routing has the locality that docs/performance.md tells of; the ends are about what other
engines counted at the same rates (57 to 77, 79 to 87 %). The other points follow replayed traces of that kind
(experts/replay.py). No model has to obey them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

CURVE = (
    (0.00, 0.00, 0.00, 0.00),
    (0.05, 0.40, 0.46, 0.58),
    (0.10, 0.57, 0.66, 0.77),
    (0.25, 0.79, 0.86, 0.90),
    (0.50, 0.88, 0.93, 0.96),
    (1.00, 1.00, 1.00, 1.00),
)
COUNTED = 0.03  # that a counted rate may be off, of another text


@dataclass(frozen=True)
class Hits:
    """0..1. counted: by a server, not of the curve."""

    low: float
    likely: float
    high: float
    counted: bool = False


def expected(share: float) -> Hits:
    """share: of all experts, those with a slot."""
    for left, right in pairwise(CURVE):
        if share <= right[0]:
            part = (share - left[0]) / (right[0] - left[0])
            low, likely, high = (a + (b - a) * part for a, b in zip(left[1:], right[1:], strict=True))
            return Hits(low, likely, high)
    return Hits(1.0, 1.0, 1.0)


def counted(rate: float) -> Hits:
    return Hits(max(0.0, rate - COUNTED), rate, min(1.0, rate + COUNTED), counted=True)
