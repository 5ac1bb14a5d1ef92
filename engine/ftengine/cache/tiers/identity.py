"""What a state depends on besides its tokens, as one key: a record of another key is never used. Torch-free.

The weights' part is bound to their content at the cost of a few hundred small reads: of an FTW directory the header,
which has the sha256 of every section; of safetensors and GGUF the files' names, sizes and headers, the sha256s that the
store or the Hub's cache recorded, and SAMPLES blocks spread over the data. What that can miss: a file of the same size
that was changed in place in less than about one part in SAMPLES of its bytes, and not recorded anew by `ft pull`;
whatever trains, merges or quantizes a model changes most blocks. `ft cache clear` is the way out.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from ftengine.cache.tiers.files import Folder
from ftengine.core import CacheLayout

KEY_FILE = "key.json"
KEY_NAME = re.compile(r"[0-9a-f]{32}")
MAX_KEY_FILE = 1 << 16
SAMPLES, SAMPLE_BYTES = 256, 4096
MAX_SMALL = 64 << 20  # bytes of a file that is hashed whole, or of a header
GGUF_HEADER = 16 << 20  # a vocabulary and the list of tensors
SMALL_FILES = ("config.json", "hf_quant_config.json")
FTW_HEADER, MANIFEST = "ftw.json", "ft-model.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class Identity(msgspec.Struct, frozen=True):
    """All but `model`, its name for people, goes into the key. Hashes are sha256 in hexadecimal."""

    model: str
    weights: str
    dtype: str
    device: str
    layout: str
    page_size: int
    template: str
    tokenizer: str
    version: str

    @property
    def key(self) -> str:
        return _hash(msgspec.json.encode(msgspec.structs.replace(self, model="")))[:32]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


LABELS = {
    "weights": "other weights",
    "template": "another template",
    "tokenizer": "another tokenizer",
    "dtype": "another dtype",
    "device": "another kind of device",
    "layout": "another layout of the cache",
    "page_size": "another page size",
    "version": "another version of ftlaunch",
}


def identify(
    model: Path,
    *,
    name: str,
    dtype: str,
    device: str,
    layout: CacheLayout,
    page_size: int,
    template: str | None,
    tokenizer: Path | bytes,
) -> Identity:
    """model: a folder of safetensors, an FTW directory or a GGUF file; tokenizer: tokenizer.json, where it lies or its
    content (Checkpoint.tokenizer()). Raises OSError.
    """
    return Identity(
        model=name,
        weights=weights_hash(model),
        dtype=dtype,
        device=device,
        layout=_hash(msgspec.json.encode(layout)),
        page_size=page_size,
        template=_hash((template or "").encode("utf-8", "surrogatepass")),
        tokenizer=_hash(tokenizer if isinstance(tokenizer, bytes) else _head(tokenizer, MAX_SMALL)),
        version=_version(),
    )


def weights_hash(model: Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    for name, content in _weight_facts(model):
        digest.update(struct.pack("<II", len(name), len(content)))
        digest.update(name.encode() + content)
    return digest.hexdigest()


def compare(other: Identity, own: Identity) -> str:
    """A clause that says what `other` is to a server of `own`."""
    differs = [label for field, label in LABELS.items() if getattr(other, field) != getattr(own, field)]
    return f"{other.model} with {', '.join(differs)}" if differs else f"{other.model}, under a wrong name"


def read_identity(folder: Folder) -> Identity:
    """Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(folder.read(KEY_FILE, MAX_KEY_FILE), type=Identity)


def key_folders(root: Folder) -> list[str]:
    return [name for name in root.folders() if KEY_NAME.fullmatch(name)]


def _weight_facts(model: Path) -> Iterator[tuple[str, bytes]]:
    if model.is_file():
        files = [model]
        if split := SPLIT.search(model.name):
            stem = model.name[: split.start()]
            files = sorted(path for path in model.parent.glob("*.gguf") if SPLIT.sub("", path.name) == stem)
        yield from _data_facts(files, {}, GGUF_HEADER)
        return
    for name in SMALL_FILES:
        if (model / name).is_file():
            yield name, _head(model / name, MAX_SMALL)
    if (model / FTW_HEADER).is_file():
        yield FTW_HEADER, _head(model / FTW_HEADER, MAX_SMALL)
        yield from ((path.name, struct.pack("<Q", path.stat().st_size)) for path in sorted(model.glob("*.ftw")))
        return
    yield from _data_facts(sorted(model.glob("*.safetensors")), _recorded(model), 0)


def _data_facts(files: list[Path], recorded: dict[str, str], header: int) -> Iterator[tuple[str, bytes]]:
    """header: bytes at the start that are hashed; 0: as many as safetensors says."""
    total = sum(path.stat().st_size for path in files)
    for path in files:
        size = path.stat().st_size
        known = next(filter(SHA256.fullmatch, (path.resolve().name, recorded.get(path.name, ""))), "")
        digest = hashlib.sha256(struct.pack("<Q", size) + known.encode())
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            start = os.pread(fd, header or 8, 0)
            digest.update(start)
            if not header and len(start) == 8:
                digest.update(os.pread(fd, min(struct.unpack("<Q", start)[0], MAX_SMALL), 8))
            place = random.Random(size)
            for _ in range(max(2, SAMPLES * size // max(total, 1))):
                digest.update(os.pread(fd, SAMPLE_BYTES, place.randrange(max(1, size - SAMPLE_BYTES))))
            digest.update(os.pread(fd, SAMPLE_BYTES, max(0, size - SAMPLE_BYTES)))
        finally:
            os.close(fd)
        yield path.name, digest.digest()


class _File(msgspec.Struct):
    size: int
    sha256: str = ""


class _Manifest(msgspec.Struct):
    files: dict[str, _File] = {}


def _recorded(model: Path) -> dict[str, str]:
    """sha256 of files as `ft pull` recorded them, of those that still have the size."""
    try:
        manifest = msgspec.json.decode(_head(model / MANIFEST, MAX_SMALL), type=_Manifest)
    except (OSError, msgspec.MsgspecError):
        return {}
    return {name: file.sha256 for name, file in manifest.files.items() if file.sha256}


def _head(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        return file.read(limit)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _version() -> str:
    try:
        return metadata.version("ftlaunch")
    except metadata.PackageNotFoundError:
        return "from source"
