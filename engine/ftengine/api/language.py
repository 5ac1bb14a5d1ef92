"""The model's own tongue, opened once: its dialect and its sampling defaults.

Slow (tokenizer files are tens of megabytes), so the server opens it in a thread after the port listens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # its package brings jinja2, which is not waited for before the port listens
    from ftengine.dialect.base import Dialect

log = logging.getLogger("ftengine.api")


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that is silent gets: the checkpoint's generation_config.json, else the APIs' own 1.0."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def read(generation_config: dict[str, Any]) -> SamplingDefaults:
        """Values that are missing or out of range are passed over. `do_sample: false` means greedy."""
        found: dict[str, Any] = {}
        for name, (kind, low, high) in _RANGES.items():
            value = generation_config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                log.warning("generation_config.json: %s is not a number and is ignored", name)
            elif not low <= value <= high:
                log.warning("generation_config.json: %s is %s, out of range, and is ignored", name, value)
            else:
                found[name] = kind(value)
        if generation_config.get("do_sample") is False:
            found["temperature"] = 0.0
        return SamplingDefaults(**found)


_RANGES: dict[str, tuple[type[int] | type[float], float, float]] = {
    "temperature": (float, 0.0, 2.0),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, 0, 1 << 20),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 0.01, 10.0),
}


@dataclass(frozen=True)
class Language:
    dialect: Dialect
    defaults: SamplingDefaults = SamplingDefaults()


OpenLanguage = Callable[[str], Language]


def open_language(model_dir: str) -> Language:
    """Raises CheckpointError."""
    from ftengine.dialect import open_dialect
    from ftengine.weights.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(model_dir)
    return Language(open_dialect(checkpoint), SamplingDefaults.read(checkpoint.generation_config))
