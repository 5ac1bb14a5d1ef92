"""How long the Hub is waited for, and how much is asked of it at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

MIB = 1 << 20
BLOCK = 4 * MIB  # what the journal records; a kill loses at most the unfinished block of each connection
SPAN = 64 * MIB  # the most that one request asks for
CHUNK = 256 << 10  # of one read from a connection
ASK_SECONDS = 30.0  # for the Hub to tell what a repository holds
MAX_RETRY_AFTER = 60.0  # seconds; a longer wait is said to the person instead


@dataclass(frozen=True)
class Limits:
    timeout: float = 30.0  # seconds without a byte, and to connect
    slowest: float = 4096.0  # bytes per second of one connection, over `timeout`; slower ones are opened anew
    attempts: int = 6  # in a row, for one request, without a finished block
    first_wait: float = 1.0  # seconds; doubled with each attempt
    connections: int = 8

    def wait(self, attempt: int) -> float:
        """Seconds before attempt number `attempt + 1`."""
        return float(min(MAX_RETRY_AFTER, self.first_wait * 2 ** (attempt - 1)))


def from_environment() -> Limits:
    """HF_HUB_DOWNLOAD_TIMEOUT, which the Hub's own client reads too, changes the timeout."""
    try:
        timeout = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", ""))
    except ValueError:
        return Limits()
    return Limits(timeout=timeout) if 0 < timeout < 3600 else Limits()
