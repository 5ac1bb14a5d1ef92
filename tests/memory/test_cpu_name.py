"""The processor's name, under which one program finds what another one measured."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from ftengine.memory.machine import cpu_name
from ftlaunch.machine.cpu import processor
from ftlaunch.machine.system import System

INTEL = "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Fake Xeon 9000  \n\nprocessor\t: 1\nmodel name\t: Other\n"
PI = "processor\t: 0\nBogoMIPS\t: 108.00\n\nRevision\t: c03114\nModel\t\t: Fake Pi 4 Model B\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [(INTEL, "Fake Xeon 9000"), (PI, "Fake Pi 4 Model B"), ("", platform.processor() or platform.machine())],
)
def test_of_a_system_that_tells(cpuinfo: str, name: str, tmp_path: Path) -> None:
    assert cpu_name(cpuinfo) == name
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo)
    assert processor(System(tmp_path)).data["name"] == name


def test_all_who_keep_something_under_it_have_the_same() -> None:
    """A profile's key, which the doctor looks for by its own finding; and reports of benches."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("ftengine._native")
    from ftengine.bench.memory import processor_name
    from ftengine.experts.profile_key import Key
    from ftengine.formats.format import BF16, ExpertLayout
    from ftlaunch.bench.turns import _machine

    name = cpu_name()
    assert Key.of(ExpertLayout(32, 16, BF16, BF16), 1, torch.bfloat16, "cpu").cpu == name
    assert processor(System()).data["name"] == name
    assert processor_name().startswith(f"{name}, ")
    assert _machine().startswith(f"{name}, ")
