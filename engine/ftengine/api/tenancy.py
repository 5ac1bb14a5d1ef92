"""When a shared background server ends by itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ftengine import leases

LOOK_SECONDS = 0.5
LOOKS_WITHOUT = 2  # in a row: one launch may leave as the next one comes


async def last_lease_ended(folder: str, grace: float) -> None:
    """Returns when, after the first lease, none is held any more, or when none came within `grace` seconds."""
    started = time.monotonic()
    seen = Path(folder).exists()  # the first lease makes it, often before the server runs
    without = 0
    while True:
        if leases.held(folder):
            seen, without = True, 0
        else:
            without += 1
            if seen and without >= LOOKS_WITHOUT:
                return
            if not seen and time.monotonic() - started > grace:
                return
        await asyncio.sleep(LOOK_SECONDS)
