"""How many of a token's experts are found in slots, how many are foretold: as stated, until it is counted."""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.models.gpu.strategy import FORETOLD, hit_range, hit_rate

COUNTED = 0.03  # that a counted rate may be off, of another text
COUNTED_FORETOLD = 0.1  # the same of the share that was foretold
CARRIED = 1.5  # how far off misses may be, as a factor, where they were counted with another number of slots


@dataclass(frozen=True)
class Hits:
    """A share, 0..1. counted: by a server, not stated."""

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


NO_FORESIGHT = Hits(0.0, 0.0, 0.0)  # where there are no slots to copy into, and of servers that copy nothing ahead


def foretold(counted: float | None, alike: bool = True) -> Hits:
    """Of a token's missing experts, those that are copied in time. counted: by servers; alike: with about as many
    experts in slots. With others it is only more likely than what is stated: the more is missing, the less is in time.
    """
    low, likely, high = FORETOLD
    if counted is None:
        return Hits(low, likely, high)
    if alike:
        low, high = counted - COUNTED_FORETOLD, counted + COUNTED_FORETOLD
    return Hits(max(0.0, min(low, counted)), counted, min(1.0, max(high, counted)), counted=True)
