"""How many of a token's experts are found in slots: the engine's stated curve, until it is counted while serving."""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.models.gpu.strategy import hit_range, hit_rate

COUNTED = 0.03  # that a counted rate may be off, of another text
CARRIED = 1.5  # how far off misses may be, as a factor, where they were counted with another number of slots


@dataclass(frozen=True)
class Hits:
    """0..1. counted: by a server, not of the curve."""

    low: float
    likely: float
    high: float
    counted: bool = False


def expected(share: float) -> Hits:
    """share: of all experts, those with a slot."""
    return Hits(*hit_range(share))


def counted(rate: float) -> Hits:
    return Hits(max(0.0, rate - COUNTED), rate, min(1.0, rate + COUNTED), counted=True)


def carried(share: float, rate: float, there: float) -> Hits:
    """Of what was counted with `there` of the experts in slots: the curve's misses, as many times more or fewer."""
    known = 1.0 - hit_rate(there)
    if not known or not there:
        return expected(share)
    missing = min(1.0, (1.0 - hit_rate(share)) * (1.0 - rate) / known)
    low = max(0.0, 1.0 - missing * CARRIED)
    return Hits(low, 1.0 - missing, 1.0 - missing / CARRIED, counted=True)
