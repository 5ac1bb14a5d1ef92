"""Every byte of every file counts: each flipped bit is found, and the right tensor or expert is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from ftengine.weights.ftw.header import read_header
from ftengine.weights.ftw.layout import HEADER_FILE, Header
from ftengine.weights.ftw.verify import verify


def expected(header: Header, file: str, offset: int) -> str:
    """Which section an offset lies in, found here without the verifier."""
    number = [item.name for item in header.files].index(file)
    for tensor in header.tensors:
        if tensor.file == number and tensor.offset <= offset < tensor.offset + tensor.extent:
            return f"the tensor {tensor.name}"
    for section in header.experts:
        if section.file == number and section.offset <= offset < section.offset + section.extent:
            expert = (offset - section.offset) // section.layout.block_bytes
            return f"expert {expert} of layer {section.layer}"
    raise AssertionError((file, offset))


def test_two_hundred_flipped_bits(copy: Callable[[], Path]) -> None:
    folder, chance = copy(), random.Random(3)
    header = read_header(folder)
    assert verify(folder) == []
    files = [path for path in sorted(folder.iterdir()) if path.name != HEADER_FILE]
    for _ in range(200):
        path = chance.choice(files)
        content = path.read_bytes()
        offset = chance.randrange(len(content))
        changed = bytearray(content)
        changed[offset] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        faults = verify(folder, threads=1)
        what = expected(header, path.name, offset) if path.suffix == ".ftw" else ""
        assert [(fault.file, fault.what) for fault in faults] == [(path.name, what)]
        path.write_bytes(content)
    assert verify(folder) == []


def test_several_faults_and_a_lost_file(copy: Callable[[], Path]) -> None:
    folder = copy()
    for name in ("dense-00001.ftw", "experts-00002.ftw"):
        with (folder / name).open("r+b") as file:
            file.write(b"\xff")
    (folder / "config.json").unlink()
    assert [fault.file for fault in verify(folder)] == ["config.json", "dense-00001.ftw", "experts-00002.ftw"]


def test_progress_reaches_the_end(converted: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(converted, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)
