"""What `ft pull` tells of a GPU before it fetches anything: the probes' answer, and no other one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ftengine.kernels import native
from ftlaunch.cli import main
from ftlaunch.machine.fit import Fit, Model, Room, fit, read
from ftlaunch.machine.verdict import gib
from tests.models import tiny
from tests.store.hubs import NAME, a_hub
from tests.support.hub_server import Hub

__all__ = ["a_hub"]  # a fixture
GIB = 1 << 30


@pytest.fixture
def served(a_hub: Hub, tmp_path: Path) -> Model:
    """Qwen3's form with 32 experts, on the Hub."""
    folder = tiny.write("qwen3", tmp_path / "model")
    a_hub.add(NAME, {path.name: path.read_bytes() for path in folder.iterdir()})
    return read(folder)


@pytest.fixture
def pulled(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, str]]:
    """Lines that `ft pull` says, by what is before their colon."""

    def pull() -> dict[str, str]:
        assert main(["pull", NAME]) == 0
        return {name: text for name, _, text in (line.partition(": ") for line in capsys.readouterr().err.splitlines())}

    return pull


def with_some_slots(model: Model) -> tuple[int, Fit]:
    """Free bytes of a GPU that holds some of the experts, and what is made of them."""
    least, most = 0, 2 * GIB
    while most - least > 1:
        free = (least + most) // 2
        made = fit(model, Room(64 * GIB, "of a test", free, "Fake 4060"))
        if 0 < made.slots < model.sizes.total:
            return free, made
        least, most = (free, most) if made.slots == 0 else (least, free)
    raise AssertionError("no such GPU")


@pytest.mark.skipif(not native.AVAILABLE, reason="memory's bandwidth is measured with the native library")
def test_a_gpu_that_holds_some_experts(
    nvidia,
    torch_13: None,
    served: Model,
    pulled: Callable[[], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RAM, VRAM, pins, disk, strategy, slots, predicted range; NVIDIA's own tool is not asked beside the driver."""
    nvidia()
    free, made = with_some_slots(served)
    monkeypatch.setenv("FAKE_DRIVER_FREE", str(free))
    asked = tmp_path / "asked"
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntouch {asked}\necho 'Another, 99999'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    told = pulled()
    total = served.sizes.total
    assert 0 < made.slots < total
    assert told["GPU"] == f"Fake 4060, {gib(free)} of 8.0 GiB for the engine"
    assert re.fullmatch(rf"needs about {re.escape(gib(made.memory))} of \S+ GiB available", told["Memory"])
    held = f"the dense part, and {made.slots} of {total} experts ({made.slots / total:.0%})"
    assert told["GPU's memory"] == f"{gib(made.vram)} of {gib(free)}: {held}"
    assert told["Pinned memory"] == f"{gib(served.sizes.banks)} of experts"
    assert re.fullmatch(rf"0\.0 GB to fetch, \d+ GB are free; {total} experts of \S+ MB", told["Disk"])
    (strategy,) = (name for name in told if name.startswith("It would be served "))
    assert strategy.rpartition(" ")[2] in ("hybrid", "offload", "cpu")
    assert told[strategy].endswith(f"; context {made.context} tokens, the model's limit is 2048")
    predicted = r"(\S+) to (\S+) tokens/s, 512 tokens of a first prompt in (\S+) to (\S+) s( \(|$)"
    found = re.match(predicted, told["Predicted"])  # who computed while memory was read may be named behind it
    assert found is not None, told["Predicted"]
    low, high, soon, late = map(float, found.groups()[:4])
    assert 0 < low < high <= 2.02 * low
    assert 0 < soon <= late
    assert not asked.exists()


def test_no_gpu_is_said(
    served: Model, pulled: Callable[[], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "libraries"
    folder.mkdir()
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / library).write_text("")  # found first, and no library
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    told = pulled()
    assert told["GPU"].startswith("none: ")
    assert "the CPU computes everything" in told["GPU"]
    assert "It would be served on the CPU; context 2048 tokens, the model's limit is 2048" in told


def test_a_driver_that_hangs_is_told_once(nvidia, served: Model, pulled: Callable[[], dict[str, str]]) -> None:
    """By the probe's answer alone, with what helps."""
    nvidia("hangs", "hangs")
    told = pulled()
    assert told["GPU"].startswith("the NVIDIA driver hangs: no answer within 6 s; ")
    assert "Try: nvidia-smi" in told["GPU"]
