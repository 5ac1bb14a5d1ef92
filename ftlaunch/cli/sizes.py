"""Numbers as people type them, in bounds: shares, and bytes such as 800MB, 6GiB, 1.5g, 123456."""

from __future__ import annotations

import math
import re
from typing import Any

import click

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
MOST = 1 << 60  # of anything that is counted: it fits into 64 bits after it was multiplied by a few
FORM = re.compile(r"(\d{1,20})(\.\d{1,9})?\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)


def size(text: str) -> int:
    """Bytes: GB is 10^9, GiB 2^30; the B can be left out. The type of an option; raises click.BadParameter."""
    found = FORM.fullmatch(text.strip())
    unit = found[3].lower() if found else ""
    if found is None or (found[4] and not unit):
        raise click.BadParameter(f"{text[:40]!r} is not a number of bytes such as 800MB or 6GiB")
    factor = (BINARY if found[4] else DECIMAL)[unit]
    number = int(found[1]) * factor + int(float(found[2] or 0) * factor)
    if number > MOST:
        raise click.BadParameter(f"{text[:40]!r} is more than any machine has")
    return number


class Share(click.FloatRange):
    """A float in bounds; "nan", which no comparison finds outside of them, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number
