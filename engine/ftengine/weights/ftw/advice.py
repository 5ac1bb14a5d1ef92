"""What converting a model would save at every start. Torch-free."""

from __future__ import annotations

import shlex
from pathlib import Path

from ftengine.weights.source import WeightSource

WORTH_SECONDS = 1.0


def advice(source: WeightSource, path: Path, nbytes: int, seconds: float) -> str | None:
    """One line for the log, after `nbytes` of weights were loaded from `path` in `seconds`.

    None where there is little to save: the weights came from FTW, or at once.
    """
    if getattr(source, "header", None) is not None or seconds < WORTH_SECONDS:
        return None
    out = path.with_suffix("") if path.suffix == ".gguf" else path
    command = f"ft checkpoint --model {shlex.quote(str(path))} --out {shlex.quote(f'{out}-ftw')}"
    return (
        f"{nbytes / 1e9:.1f} GB of weights were read and packed in {seconds:.1f} s; "
        f"converted once ({command}) they are only read, at the disk's full rate"
    )
