"""Which reader a model's weights need, told from what lies at its path."""

from __future__ import annotations

from pathlib import Path

from ftengine.weights.source import WeightSource


def open_source(path: Path) -> WeightSource:
    """An FTW directory, a GGUF file or a directory of safetensors. Raises CheckpointError."""
    if path.is_file():
        from ftengine.weights.gguf_source import GgufSource

        return GgufSource(path)
    from ftengine.weights.ftw.header import is_ftw

    if is_ftw(path):
        from ftengine.weights.ftw.source import FtwSource

        return FtwSource(path)
    from ftengine.weights.safetensors_source import SafetensorsSource

    return SafetensorsSource(path)
