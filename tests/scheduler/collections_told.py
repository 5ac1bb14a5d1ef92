"""A plugin (FT_PLUGINS): the tests' model, and when each full collection of the interpreter's garbage ended.

A line for each, seconds of time.monotonic, in the file that COLLECTIONS names.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

from tests.scheduler import tiny  # noqa: F401  registers the model

FILE = Path(os.environ["COLLECTIONS"])


def _told(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        with FILE.open("a", encoding="ascii") as out:
            out.write(f"{time.monotonic()}\n")


gc.callbacks.append(_told)
