"""What the weights of a repository consist of, from the headers of its safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ftengine.errors import CheckpointError
from ftengine.weights.header import read_header
from ftlaunch.store.fit import Weights
from ftlaunch.store.hub.errors import HubError
from ftlaunch.store.hub.repository import RemoteFile

EXPERT = ".experts."


def weigh(folder: Path, files: Sequence[RemoteFile], name: str) -> Weights:
    """Of the chosen files, safetensors laid out in `folder` (skeleton.py). Raises HubError for a header that no sound
    file can have; name: of the repository, for that.
    """
    experts = 0
    total = sum(file.size for file in files if file.path.lower().endswith(".gguf"))
    for file in files:
        if file.path.lower().endswith(".safetensors"):
            own, all_of_it = _weigh(folder, file, name)
            experts, total = experts + own, total + all_of_it
    return Weights(total, experts)


def _weigh(folder: Path, shard: RemoteFile, name: str) -> tuple[int, int]:
    """Bytes of experts, and of all tensors."""
    path = folder / shard.path.rpartition("/")[2]
    try:
        tensors = read_header(path).values()
    except CheckpointError as error:
        reason = str(error).replace(str(path), shard.path)
        raise HubError(f"{reason} (in {name})", "choose another model") from None
    return sum(t.nbytes for t in tensors if EXPERT in t.name), sum(t.nbytes for t in tensors)
