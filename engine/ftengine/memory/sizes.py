"""Bytes in words, for reasons, refusals and the commands that these advise. Torch-free."""

from __future__ import annotations

GIB, MIB = 1 << 30, 1 << 20


def gigabytes(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def megabytes(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def typed(size: int) -> str:
    """As an option of `ft serve` takes it, rounded down to whole MiB."""
    return f"{size // MIB}MiB" if size >= MIB else "0"
