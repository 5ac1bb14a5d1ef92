"""A GGUF file, or a model split into several of them, seen as a model folder: the small files that it stands for.

Torch-free. Split files are llama.cpp's: `NAME-00001-of-00003.gguf`, the first with the model's metadata.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ftengine.errors import CheckpointError
from ftengine.weights import gguf_config
from ftengine.weights.files import locate
from ftengine.weights.gguf_header import GgufHeader, GgufTensor, read_gguf_header

SUFFIX = ".gguf"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_SPLITS = 999


def open_gguf(path: Path) -> GgufFiles:
    """Raises CheckpointError: not a sound GGUF file, or not all parts of a split one."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return GgufFiles(read_gguf_header(_file(path)))
    total = int(match[3])
    if not 1 <= total <= MAX_SPLITS:
        raise CheckpointError(f"{path} calls itself one of {total} parts")
    headers = [
        read_gguf_header(_file(path.with_name(f"{match[1]}-{n:05}-of-{total:05}.gguf"))) for n in range(1, total + 1)
    ]
    return GgufFiles(_joined(headers))


def _file(path: Path) -> Path:
    found = locate(path.parent, path.name)
    if found is None:
        raise CheckpointError(f"{path} is missing", "ft list")
    return path


def _joined(headers: list[GgufHeader]) -> GgufHeader:
    first = headers[0]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        if header.metadata.get("split.no") != number or header.metadata.get("split.count") != len(headers):
            raise CheckpointError(f"{header.path} is not the part of the model that its name says")
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"the tensor {name} is in both {tensors[name].file.name} and {header.path.name}")
            tensors[name] = tensor
    if first.metadata.get("split.tensors.count") != len(tensors):
        raise CheckpointError(f"{first.path} announces another number of tensors than its parts have")
    return replace(first, tensors=tensors)


class GgufFiles:
    """The files of a model folder, made of one header. Fulfils weights.files.ModelFiles."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def json(self, name: str, limit: int) -> dict[str, Any] | None:
        if name == "config.json":
            return dict(self.config)
        if name == "generation_config.json":
            return gguf_config.generation_config(self.header)
        if name == "tokenizer_config.json":
            return gguf_config.tokenizer_config(self.header)
        return None

    def text(self, name: str, limit: int) -> str | None:
        content = self.content(name, limit)
        return None if content is None else content.decode("utf-8")

    def content(self, name: str, limit: int) -> bytes | None:
        if name == "tokenizer.json":
            return self._tokenizer
        if name == "chat_template.jinja":
            template = self.header.metadata.get("tokenizer.chat_template")
            return template.encode("utf-8") if isinstance(template, str) else None
        content = self.json(name, limit)
        return None if content is None else msgspec.json.format(msgspec.json.encode(content), indent=2)

    @cached_property
    def config(self) -> dict[str, Any]:
        return gguf_config.config(self.header)

    @cached_property
    def _tokenizer(self) -> bytes:
        from ftengine.weights.gguf_tokenizer import tokenizer_json

        return tokenizer_json(self.header)
