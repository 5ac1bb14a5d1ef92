"""The models on this machine: those of the store, and those that lie in the Hugging Face cache."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftengine.errors import CheckpointError
from ftlaunch import paths
from ftlaunch.store import hf_cache, manifest, used
from ftlaunch.store.catalogue import short_name
from ftlaunch.store.names import canonical, hub_name, weights_path

if TYPE_CHECKING:
    from ftengine.weights.checkpoint import Checkpoint

FETCHED, BUILT = ".fetch-", ".partial-"
REPLACED = ".old-"
BLOCK = 512  # bytes: the unit of st_blocks
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

Where = Literal["store", "cache"]


@dataclass(frozen=True)
class Installed:
    name: str
    path: Path  # its directory
    bytes: int  # of all its files
    architecture: str
    context: int | None  # tokens; None when the model does not say
    format: str = ""  # safetensors, gguf, ftw
    weights: str = ""  # number format of the weights, as the model's configuration names it
    where: Where = "store"
    last_used: float | None = None  # Unix time, seconds


@dataclass(frozen=True)
class Partial:
    """What an interrupted pull of a model that is not there left, and the next one continues."""

    name: str
    path: Path
    bytes: int

    @property
    def can_go_on(self) -> bool:
        """False for what was copied from this machine: where from is recorded at the end only."""
        return short_name(self.name) is not None or hub_name(self.name) is not None


def installed() -> list[Installed]:
    """Of the store, by name. What is being fetched is not listed; what cannot be read is, with the reason as its
    architecture.
    """
    folders = [path for path in _folders() if path.name[0] != "."]
    return [_describe(canonical(path.name), path, "store", tree_bytes(path)) for path in folders]


def cached() -> list[Installed]:
    """Complete models in the Hugging Face cache, by name."""
    return [_describe(model.repo, model.path, "cache", model.bytes) for model in hf_cache.models()]


def partial() -> list[Partial]:
    """By name."""
    places: dict[str, list[Path]] = {}
    for path in _folders():
        for prefix in (FETCHED, BUILT):
            name = path.name.removeprefix(prefix)
            if path.name.startswith(prefix) and not (paths.models() / name).is_dir():
                places.setdefault(name, []).append(path)
    found = [Partial(canonical(name), own[0], tree_bytes(*own)) for name, own in places.items()]
    return sorted(found, key=lambda item: item.name)


def tree_bytes(*directories: Path) -> int:
    """On the disk, of the files below; one with several names counts once, and links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    for directory in directories:
        for path in directory.rglob("*"):
            try:
                status = path.lstat()
            except OSError:  # it was renamed or removed meanwhile
                continue
            if stat.S_ISREG(status.st_mode):  # a file that is being fetched has holes
                sizes[status.st_dev, status.st_ino] = min(status.st_size, status.st_blocks * BLOCK)
    return sum(sizes.values())


def _folders() -> list[Path]:
    root = paths.models()
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _describe(name: str, path: Path, where: Where, size: int) -> Installed:
    from ftengine.weights.checkpoint import Checkpoint

    last = used.when(name)
    lost = manifest.damaged(path) if where == "store" else None
    if lost is not None:
        reason = f"damaged: its file {lost} is missing or cut short"
        return Installed(name, path, size, reason, None, where=where, last_used=last)
    try:
        checkpoint = Checkpoint.open(weights_path(path))
        form, weights = forms(checkpoint)
    except (CheckpointError, OSError) as error:
        return Installed(name, path, size, f"unreadable: {error}", None, where=where, last_used=last)
    return Installed(name, path, size, checkpoint.architecture, checkpoint.max_context, form, weights, where, last)


def forms(checkpoint: Checkpoint) -> tuple[str, str]:
    """The files' format and the weights' number format, from what is quick to read. Raises CheckpointError."""
    from ftengine.weights.ftw.header import is_ftw

    if checkpoint.gguf is not None:
        return "gguf", _most(checkpoint)
    if is_ftw(checkpoint.path):
        return "ftw", _ftw_weights(checkpoint.path)
    return "safetensors", configured_weights(checkpoint)


def configured_weights(checkpoint: Checkpoint) -> str:
    """As config.json names it: the quantization, else the type that the weights were saved in."""
    config = checkpoint.config
    given = config.get("quantization_config") or checkpoint.text_config.get("quantization_config")
    if isinstance(given, dict):
        for key in ("quant_algo", "format", "fmt", "quant_method"):
            if isinstance(given.get(key), str):
                return str(given[key])[:40].lower()
        return "quantized"
    for source in (checkpoint.text_config, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(source.get(key), str):
                return DTYPES.get(source[key], str(source[key])[:40])
    return "?"


def _most(checkpoint: Checkpoint) -> str:
    """The type that most bytes of a GGUF file have."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors().values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default="?").lower()


def _ftw_weights(path: Path) -> str:
    from ftengine.formats.format import BY_NUMBER
    from ftengine.weights.ftw.header import read_header

    header = read_header(path)
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.number_format.name] = sizes.get(tensor.number_format.name, 0) + tensor.nbytes
    for section in header.experts:
        name = BY_NUMBER[section.gate_up].name
        sizes[name] = sizes.get(name, 0) + section.extent
    return max(sizes, key=lambda kind: sizes[kind], default="?")
