"""Routing traces: what the router chose, decode step by decode step, in an .npz file.

    ids     int16   [steps, layers, k]   the experts chosen, most probable first
    near    int16   [steps, layers, 16]  experts by falling probability, the chosen ones first, then near misses
    nearp   float32 [steps, layers, 16]  their probabilities
    E       int     experts a layer

A trace is of one sequence: of a batch the first row is recorded.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftengine.errors import FtError

NEAR = 16

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Trace:
    """ids int64 [steps, layers, k]; near int64 and probabilities float32 [steps, layers, n], n >= k."""

    ids: Array
    near: Array
    probabilities: Array
    experts: int

    @property
    def steps(self) -> int:
        return int(self.ids.shape[0])

    @property
    def layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])


def near_misses(ids: Array, logits: Array) -> tuple[Array, Array]:
    """ids [N, layers, k], logits [N, layers, E] -> near int16 and their probabilities float32 [N, layers, n]."""
    experts, chosen = logits.shape[2], ids.astype(np.int64)
    wide = logits.astype(np.float32)
    wide -= wide.max(-1, keepdims=True, initial=-np.inf)
    mass = np.exp(wide)
    total = mass.sum(-1, keepdims=True)
    # The stored logits are rounded, the ids are not: the chosen go first, as the router ordered them.
    rest = mass.copy()
    np.put_along_axis(rest, chosen, -1.0, -1)
    count = min(max(NEAR, ids.shape[2]), experts)
    misses = np.argsort(-rest, -1, kind="stable")[:, :, : count - ids.shape[2]]
    near = np.concatenate([chosen, misses], -1)
    return near.astype(np.int16), (np.take_along_axis(mass, near, -1) / total).astype(np.float32)


def encode_trace(ids: Array, near: Array, probabilities: Array, experts: int) -> bytes:
    """What a trace's file holds. Not compressed: that would hold up an engine."""
    file = io.BytesIO()
    np.savez(file, ids=ids.astype(np.int16), near=near, nearp=probabilities, E=np.int64(experts))
    return file.getvalue()


def store_trace(path: Path, data: bytes) -> Trace:
    """Writes a new file that only its owner may read; it is there as a whole or not at all.

    Raises FtError for data that are no trace, and OSError.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        trace = load_trace(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return trace


def load_trace(path: Path) -> Trace:
    """Raises FtError for what is not a trace."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz file")
        with np.load(path, allow_pickle=False) as file:
            return _checked({name: file[name] for name in ("ids", "near", "nearp", "E") if name in file})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FtError(f"{path} is not a routing trace: {reason}", "ft bench trace --help") from error


def _checked(parts: dict[str, Array]) -> Trace:
    ids = parts.get("ids")
    if ids is None or ids.ndim != 3 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError('it has no "ids" [steps, layers, k]')
    ids = ids.astype(np.int64)
    experts = int(parts["E"]) if "E" in parts else int(ids.max()) + 1
    near = parts.get("near", ids).astype(np.int64)
    probabilities = parts.get("nearp")
    if probabilities is None:
        probabilities = np.full(near.shape, 1.0 / near.shape[-1])
    elif probabilities.dtype == np.uint8:
        probabilities = probabilities / 255.0
    if near.shape[:2] != ids.shape[:2] or near.shape != probabilities.shape:
        raise ValueError('"near" and "nearp" do not fit "ids"')
    for name, values in (("ids", ids), ("near", near)):
        if values.min(initial=0) < 0 or values.max(initial=0) >= experts:
            raise ValueError(f'"{name}" names experts outside 0..{experts - 1}')
    return Trace(ids, near, probabilities.astype(np.float32), experts)
