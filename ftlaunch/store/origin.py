"""Where a model came from, for the header of what is made of it."""

from __future__ import annotations

from ftengine.weights.ftw.header import is_ftw, read_header
from ftengine.weights.ftw.layout import Origin
from ftlaunch.store import manifest
from ftlaunch.store.find import Found

MAX_NAME = 512


def origin(found: Found) -> Origin:
    """Of an FTW directory its own origin; the store's record; the Hugging Face cache's commit; else the bare name."""
    if found.path.is_dir() and is_ftw(found.path):
        return read_header(found.path).origin
    kind = "safetensors" if found.path.is_dir() else "gguf"
    written = manifest.read(found.path if found.path.is_dir() else found.path.parent)
    if written is not None and written.source.kind == "hub":
        return Origin(written.source.repo[:MAX_NAME], written.source.revision[:MAX_NAME], kind)
    revision = found.path.name if found.where == "cache" else ""
    return Origin(found.name[-MAX_NAME:], revision, kind)
