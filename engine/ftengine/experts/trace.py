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
import struct
import textwrap
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftengine.errors import FtError

NEAR = 16
# A recording of ours is at most 60 MB. Widened, these are a few GB.
MOST_BYTES = 256 << 20
# layers x experts: a replay keeps numbers for each.
MOST_EXPERTS = 1_000_000

Array = np.ndarray[Any, np.dtype[Any]]

# Kinds of dtype a trace's arrays may have.
_KINDS = {"ids": "iu", "near": "iu", "nearp": "fu", "E": "iu"}
# What zipfile, zlib and numpy's reader of headers raise for files that are damaged or made to harm.
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    EOFError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, about headers as Python 2 wrote them
            parts = _arrays(path)
        return _checked(parts)
    except _UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, MemoryError):
            reason = "its arrays do not fit into memory"
        # numpy quotes headers, which are the file's.
        reason = textwrap.shorten(reason or type(error).__name__, 200, placeholder=" ...")
        raise FtError(f"{path} is not a routing trace: {reason}", "ft bench trace --help") from error


def _arrays(path: Path) -> dict[str, Array]:
    """The archive's size is looked at before anything is unpacked: a few kilobytes may unpack to petabytes.

    zipfile gives no more bytes of a member than its entry promises. numpy writes only the two methods named here;
    the other decompressors have errors of their own.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no .npz file")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.flag_bits & 1 for entry in entries):
            raise ValueError("it is encrypted")
        if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
            raise ValueError("it is not compressed as .npz files are")
        if sum(entry.file_size for entry in entries) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
        parts = {}
        for name in {f"{name}.npy" for name in _KINDS}.intersection(entry.filename for entry in entries):
            with archive.open(name) as member:
                parts[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
        return parts


def _checked(parts: dict[str, Array]) -> Trace:
    for name, array in parts.items():
        if array.dtype.kind not in _KINDS[name]:
            raise ValueError(f'"{name}" holds values of type {array.dtype}')
    ids = parts.get("ids")
    if ids is None or ids.ndim != 3 or ids.size == 0:
        raise ValueError('it has no "ids" [steps, layers, k]')
    near = parts.get("near", ids)
    if near.ndim != 3 or near.shape[:2] != ids.shape[:2] or near.shape[2] < ids.shape[2]:
        raise ValueError('"near" does not fit "ids"')
    experts = _experts(parts.get("E"), ids)
    if experts * ids.shape[1] > MOST_EXPERTS:
        raise ValueError(f"it has more than {MOST_EXPERTS} experts in all layers")
    for name, values in (("ids", ids), ("near", near)):
        if values.min() < 0 or values.max() >= experts:
            raise ValueError(f'"{name}" names experts outside 0..{experts - 1}')
        row = np.sort(values, -1)
        if (row[:, :, 1:] == row[:, :, :-1]).any():
            raise ValueError(f'"{name}" names an expert twice in one layer of a step')
    return Trace(ids.astype(np.int64), near.astype(np.int64), _probabilities(parts.get("nearp"), near), experts)


def _experts(stored: Array | None, ids: Array) -> int:
    if stored is None:
        return int(ids.max()) + 1
    if stored.ndim or stored < 1:
        raise ValueError('"E" is not one positive number')
    return int(stored)


def _probabilities(stored: Array | None, near: Array) -> Array:
    """float32 as `near`; stored bytes are 255ths."""
    if stored is None:
        return np.full(near.shape, 1 / near.shape[2], np.float32)
    if stored.shape != near.shape:
        raise ValueError('"near" and "nearp" do not fit each other')
    if stored.dtype.kind == "u" and stored.dtype.itemsize > 1:
        raise ValueError(f'"nearp" holds values of type {stored.dtype}')
    # Room for how half precision rounds; what is not a number fails, too.
    whole = 255 if stored.dtype.kind == "u" else 1
    if not ((stored >= 0) & (stored <= 1.01 * whole)).all():
        raise ValueError('"nearp" holds what is not a probability')
    probabilities = stored.astype(np.float32)
    probabilities /= whole
    return probabilities
