"""What steps are made of, from kernels of known times; and every kernel of the engine belongs to a part."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import ftengine.kernels
from ftengine.bench.step_parts import OTHER, Part, Ran, divide, part_of

KERNELS = Path(ftengine.kernels.__file__).parent / "triton"


def test_the_parts_and_the_rest_make_up_the_step() -> None:
    """Two steps of 50: attention alone for 10, beside a copy for 10, the copy alone for 5, nothing for 25."""
    kernels = []
    for step in (0.0, 50.0):
        kernels += [Ran("_attend", step, step + 20.0), Ran("_copy_blocks", step + 10.0, step + 25.0)]
    kernels.append(Ran("_end_step", 100.0, 100.0))  # a moment: where the last step ends
    random.Random(1).shuffle(kernels)
    found = divide(kernels, 2)
    assert found.parts["attention"] == Part(20.0, 10.0)
    assert found.parts["copy over the link"] == Part(15.0, 5.0)
    assert (found.together, found.idle, found.step) == (10.0, 25.0, 50.0)
    assert sum(part.alone for part in found.parts.values()) + found.together + found.idle == found.step
    lines = found.lines()
    assert [line.split() for line in lines][1] == ["attention", "20", "10"]
    assert all(len(line) <= 80 for line in lines)


def test_two_kernels_of_one_part_are_not_several_parts() -> None:
    found = divide([Ran("gemv_kernel", 0.0, 4.0), Ran("skinny_kernel", 2.0, 6.0)], 1)
    assert found.parts == {"dense products": Part(8.0, 6.0)}
    assert (found.together, found.idle) == (0.0, 0.0)


def test_nothing_seen_is_no_step() -> None:
    with pytest.raises(ValueError, match="no kernel was seen"):
        divide([], 3)


def test_every_kernel_that_a_step_launches_has_a_part() -> None:
    """By their names in the sources; handshake.py is launched by benches alone."""
    launched = set()
    for path in KERNELS.glob("*.py"):
        if path.stem != "handshake":
            text = path.read_text(encoding="utf-8")
            launched |= set(re.findall(r"^ +(_\w+)\[", text, re.MULTILINE))
            launched |= set(re.findall(r"^def (\w+_(?:kernel|rows|dots|tiles))\(", text, re.MULTILINE))
    assert {"_route", "_join", "gemv_kernel", "down_tiles"} <= launched
    assert [name for name in sorted(launched) if part_of(name) == OTHER] == []
    assert part_of("void at::native::vectorized_elementwise_kernel") == OTHER
