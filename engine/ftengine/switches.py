"""Variables of the environment by which measurements and comparisons change how the engine computes: what each may be.
docs/environment.md tells what they do. Torch-free.

Most are read where they count, which for some is on a GPU only; `check` looks at all of them before anything is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from ftengine.errors import ConfigError

MOST_PREFETCH = 8  # experts a layer, as kernels/triton/cache_state.py has room for
POLICIES = ("aged", "lru")  # of the expert cache, the default first; kernels/triton/cache_state.py has their rules
OFF = ("FT_MMA", "FT_PDL", "FT_PRECOMPILE", "FT_AHEAD", "FT_PIN")  # 0: off


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for the first one that is set to what it cannot be."""
    if (text := environment.get("FT_SPLIT")) is not None:
        split(text)
    if (text := environment.get("FT_PREFETCH")) is not None:
        prefetch(text)
    if (text := environment.get("FT_CACHE_POLICY")) is not None:
        policy(text)
    for name in OFF:
        if (text := environment.get(name, "")) not in ("", "0", "1"):
            raise ConfigError(f"{name} is {text!r}: 0 is off, and 1 as without it", f"unset {name}")


def split(text: str) -> float | bool:
    """Of FT_SPLIT: True to follow costs, False to stay with those of the start, else the CPU's share. Raises
    ConfigError.
    """
    if text in ("online", "fixed"):
        return text == "online"
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"FT_SPLIT is {text!r}: online, fixed, or the CPU's share from 0 to 1", "unset FT_SPLIT")
    return share


def prefetch(text: str) -> int:
    """Of FT_PREFETCH: experts a layer. Raises ConfigError."""
    if text not in map(str, range(MOST_PREFETCH + 1)):
        raise ConfigError(f"FT_PREFETCH is {text!r}: from 0 to {MOST_PREFETCH} experts a layer", "unset FT_PREFETCH")
    return int(text)


def policy(text: str) -> str:
    """Of FT_CACHE_POLICY: one of POLICIES. Raises ConfigError."""
    if text not in POLICIES:
        raise ConfigError(f"FT_CACHE_POLICY is {text!r}: {' or '.join(POLICIES)}", "unset FT_CACHE_POLICY")
    return text
