"""Numbers of bytes as people type them: 800MB, 6GiB, 1.5g, 123456."""

from __future__ import annotations

import re

import click

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
FORM = re.compile(r"(\d{1,20})(\.\d{1,9})?\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)


def size(text: str) -> int:
    """Bytes: GB is 10^9, GiB 2^30; the B can be left out. The type of an option; raises click.BadParameter."""
    found = FORM.fullmatch(text.strip())
    unit = found[3].lower() if found else ""
    if found is None or (found[4] and not unit):
        raise click.BadParameter(f"{text[:40]!r} is not a number of bytes such as 800MB or 6GiB")
    factor = (BINARY if found[4] else DECIMAL)[unit]
    return int(found[1]) * factor + int(float(found[2] or 0) * factor)
