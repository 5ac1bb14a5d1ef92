"""Reads, checks and writes `ftw.json`. Torch-free.

The file is one line, byte for byte `{"sha256":"<64 hexadecimal digits>","header":<JSON>}` and a line feed; the hash is
of <JSON>, so that a header which changed by a single bit is not used. The hash stops accidents, not people: everything
that the header says is checked as untrusted input before memory is taken or a byte of data is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ftengine.errors import CheckpointError
from ftengine.formats.format import BY_NUMBER
from ftengine.weights.files import MEBIBYTE, locate, open_regular, read_bytes
from ftengine.weights.ftw.layout import HEADER_FILE, SECTION_ALIGN, VERSION, ExpertSection, Header, TensorSection

# 400,000 expert blocks; the largest models of today have 25,000.
MAX_HEADER_BYTES = 32 * MEBIBYTE

PREFIX, MIDDLE, SUFFIX = b'{"sha256":"', b'","header":', b"}\n"
DIGEST = 64
PLAIN_FORMATS = ("f32", "f16", "bf16")
DATA_FILE = re.compile(r"[a-z][a-z0-9-]{0,63}\.ftw")
ATTACHMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
REMEDY = "ft verify, then ft checkpoint again from the original model"


class _Version(msgspec.Struct):
    version: int


def is_ftw(folder: Path) -> bool:
    """Whether the folder claims to be one. Opens nothing."""
    return os.path.lexists(folder / HEADER_FILE)


def read_header(folder: Path) -> Header:
    """The folder's header, checked, and every data file there in its full size. Raises CheckpointError."""
    content = read_bytes(folder, HEADER_FILE, MAX_HEADER_BYTES)
    if content is None:
        raise CheckpointError(f"{folder} holds no {HEADER_FILE}, so it is not an FTW directory")
    header = decode(content, folder / HEADER_FILE)
    for file in header.files:
        data_path(folder, file.name, file.size)
    return header


def data_path(folder: Path, name: str, size: int) -> Path:
    """The data file's path, if it is a regular file of that size."""
    path = locate(folder, name)
    if path is None:
        raise CheckpointError(f"{folder} is incomplete: {name} is missing", REMEDY)
    descriptor = open_regular(path)
    try:
        found = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if found != size:
        raise CheckpointError(f"{folder / name} has {found} bytes, its header says {size}", REMEDY)
    return path


def encode(header: Header) -> bytes:
    """The content of `ftw.json`. Raises CheckpointError for a header that `decode` would refuse."""
    raw = msgspec.json.encode(header)
    content = PREFIX + hashlib.sha256(raw).hexdigest().encode() + MIDDLE + raw + SUFFIX
    if decode(content, Path(HEADER_FILE)) != header:
        raise ValueError("the header does not read back as it was written")
    return content


def decode(content: bytes, path: Path) -> Header:
    """`path` is what errors name. Raises CheckpointError."""
    raw = _checked_json(content, path)
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if version != VERSION:
            raise CheckpointError(
                f"{path} is of FTW version {str(version)[:20]}, this ft reads version {VERSION}",
                "ft checkpoint, to write it again from the original model",
            )
        header = msgspec.json.decode(raw, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    reason = next(_faults(header), None)
    if reason is not None:
        raise _damaged(path, reason)
    return header


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound FTW header: {reason}", REMEDY)


def _checked_json(content: bytes, path: Path) -> bytes:
    start = len(PREFIX) + DIGEST
    digest, raw = content[len(PREFIX) : start], content[start + len(MIDDLE) : -len(SUFFIX)]
    if content != PREFIX + digest + MIDDLE + raw + SUFFIX:
        raise _damaged(path, "it is cut short, or another program wrote it")
    if hashlib.sha256(raw).hexdigest().encode() != digest:
        raise _damaged(path, "its content does not match its own hash, so it changed after it was written")
    return raw


def _faults(header: Header) -> Iterator[str]:
    """Every reason not to use the header; no section is measured before its format is known."""
    yield from _name_faults(header)
    for tensor in header.tensors:
        yield from _tensor_faults(tensor)
    for section in header.experts:
        yield from _expert_faults(section)
    yield from _coverage_faults(header)


def _name_faults(header: Header) -> Iterator[str]:
    for file in header.files:
        if not DATA_FILE.fullmatch(file.name):
            yield f"the data file name {file.name[:80]!a} is refused"
    for attachment in header.attachments:
        reserved = attachment.name == HEADER_FILE or attachment.name.endswith(".ftw")
        if reserved or not ATTACHMENT.fullmatch(attachment.name):
            yield f"the file name {attachment.name[:80]!a} is refused"
        if not HEXADECIMAL.fullmatch(attachment.sha256):
            yield f"the hash of {attachment.name} is none"
    for kind, names in (
        ("file", [file.name for file in header.files] + [attachment.name for attachment in header.attachments]),
        ("tensor", [tensor.name for tensor in header.tensors]),
        ("expert layer", [section.layer for section in header.experts]),
    ):
        if len(set(names)) < len(names):
            yield f"a {kind} is listed twice"


def _tensor_faults(tensor: TensorSection) -> Iterator[str]:
    name = tensor.name
    if not name or not name.isprintable():
        yield f"the tensor name {name[:64]!a} is not acceptable"
    if tensor.format not in BY_NUMBER:
        yield f"{name} has the unknown format {tensor.format}"
    elif tensor.packed and len(tensor.shape) != 2:
        yield f"{name} is in panel order but no matrix"
    elif not tensor.packed and tensor.number_format.name not in PLAIN_FORMATS:
        yield f"{name} is {tensor.number_format.name}, which exists in panel order only"
    if not HEXADECIMAL.fullmatch(tensor.sha256):
        yield f"the hash of {name} is none"


def _expert_faults(section: ExpertSection) -> Iterator[str]:
    for number in (section.gate_up, section.down):
        if number not in BY_NUMBER:
            yield f"the experts of layer {section.layer} have the unknown format {number}"
    if not all(map(HEXADECIMAL.fullmatch, section.sha256)):
        yield f"a hash of layer {section.layer}'s experts is none"


def _coverage_faults(header: Header) -> Iterator[str]:
    """Sections lie at their alignment and cover each file from its first byte to its last."""
    named: list[tuple[str, TensorSection | ExpertSection]] = [(tensor.name, tensor) for tensor in header.tensors]
    named += [(f"layer {section.layer}'s experts", section) for section in header.experts]
    ends = [0] * len(header.files)
    for name, section in sorted(named, key=lambda item: (item[1].file, item[1].offset)):
        if section.file >= len(ends):
            yield f"{name}: there is no data file {section.file}"
            return
        if section.offset % SECTION_ALIGN:
            yield f"{name} does not begin at a multiple of {SECTION_ALIGN}"
        if section.offset != ends[section.file]:
            yield f"{name} {'overlaps' if section.offset < ends[section.file] else 'leaves a gap after'} another one"
        ends[section.file] = section.offset + section.extent
    for file, end in zip(header.files, ends, strict=True):
        if file.size != end:
            yield f"{file.name} is said to have {file.size} bytes, its sections have {end}"
