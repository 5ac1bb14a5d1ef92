"""What a pull tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """A sentence for a person."""

    text: str


@dataclass(frozen=True)
class Stage:
    """A part of the work whose size is not told in bytes."""

    stage: str
    done: float  # 0..1


@dataclass(frozen=True)
class Planned:
    """Before the first byte. `present` of `bytes` are here from an earlier pull."""

    name: str
    revision: str  # commit; empty when the source has none
    files: int
    bytes: int
    present: int


@dataclass(frozen=True)
class Moved:
    """Bytes have arrived. files: name -> (bytes, size) of those on their way."""

    files: dict[str, tuple[int, int]]
    done: int
    total: int


@dataclass(frozen=True)
class Complete:
    """A file is whole, checked and on the disk."""

    file: str
    sha256: str


Event = Said | Stage | Planned | Moved | Complete
Observer = Callable[[Event], None]
