"""Which reader a model's weights need, told from what lies at its path."""

from __future__ import annotations

from pathlib import Path

from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.ftw.files import FtwFiles
from ftengine.weights.ftw.header import is_ftw
from ftengine.weights.source import WeightSource


def open_files(checkpoint: Checkpoint) -> FtwFiles | None:
    """Of an FTW directory, what can be opened and read without torch; None for other models. Raises CheckpointError."""
    return FtwFiles(checkpoint.path) if is_ftw(checkpoint.path) else None


def open_source(model: Path | Checkpoint | FtwFiles) -> WeightSource:
    """An FTW directory, a GGUF file or a directory of safetensors; of an open checkpoint, what it has read already is
    not read again. Raises CheckpointError.
    """
    if isinstance(model, FtwFiles):
        from ftengine.weights.ftw.source import FtwSource

        return FtwSource(model)
    path = model.path if isinstance(model, Checkpoint) else model
    if path.is_file():
        from ftengine.weights.gguf_source import GgufSource

        return GgufSource(model)
    if is_ftw(path):
        from ftengine.weights.ftw.source import FtwSource

        return FtwSource(path)
    from ftengine.weights.safetensors_source import SafetensorsSource

    return SafetensorsSource(model)
