"""Where each section of a directory that is to be written goes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from ftengine.weights.ftw.layout import DataFile, ExpertSection, TensorSection

NO_HASH = "0" * 64  # until the section is written

Section = TypeVar("Section", TensorSection, ExpertSection)


def place(
    tensors: Iterable[TensorSection], experts: Iterable[ExpertSection], shard_bytes: int | None = None
) -> tuple[tuple[DataFile, ...], tuple[TensorSection, ...], tuple[ExpertSection, ...]]:
    """Gives every section its file and offset, in the given order, dense files first; `file` and `offset` are set.

    shard_bytes: a file's largest size, except where one section alone is larger.
    """
    dense, tensor_sections = _fill("dense", list(tensors), 0, shard_bytes)
    routed, expert_sections = _fill("experts", list(experts), len(dense), shard_bytes)
    return (*dense, *routed), tuple(tensor_sections), tuple(expert_sections)


def _fill(
    kind: str, sections: Sequence[Section], first: int, limit: int | None
) -> tuple[list[DataFile], list[Section]]:
    ends: list[int] = []
    placed: list[Section] = []
    for section in sections:
        if not ends or (limit is not None and ends[-1] and ends[-1] + section.extent > limit):
            ends.append(0)
        placed.append(msgspec.structs.replace(section, file=first + len(ends) - 1, offset=ends[-1]))
        ends[-1] += section.extent
    return [DataFile(f"{kind}-{number:05}.ftw", end) for number, end in enumerate(ends, 1)], placed
