"""GPUs through libraries of our own in the place of NVIDIA's: which answer, refuse, hang, crash, or are not there.

The probe runs as it does in `ft doctor`, in a process of its own, with the package nvidia-ml-py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ftengine.memory import gpu as engine
from ftlaunch.cli import main
from ftlaunch.machine import gpu, nvml, pci
from ftlaunch.machine.probe import BY_NAME, Asked
from ftlaunch.machine.run import examine, run
from ftlaunch.machine.verdict import EXIT, Finding
from tests.support.timing import quickest, seconds

GIB = 1 << 30
QUICK = Asked(quick=True)
PATIENT = 12.0  # seconds, where it is not the time that is tested
DOMAIN = "fa4e:"  # of the PCI addresses that fake_nvml.c tells


def findings_of(asked: Asked = QUICK, limit: float = PATIENT) -> list[Finding]:
    """Without the links of this machine's own cards, which no library in the way keeps the kernel from listing."""
    probe = replace(BY_NAME["gpu"], seconds=limit, quick_seconds=limit)
    return [each for each in run([probe], asked)["gpu"] if each.data.get("address", DOMAIN).startswith(DOMAIN)]


def found(asked: Asked = QUICK, limit: float = PATIENT) -> dict[str, Finding]:
    """By id; of two GPUs the first."""
    findings: dict[str, Finding] = {}
    for finding in findings_of(asked, limit):
        findings.setdefault(finding.id, finding)
    return findings


@pytest.mark.parametrize("quick", [True, False])
def test_two_healthy_gpus(nvidia, torch_13, quick: bool) -> None:
    nvidia()
    findings = findings_of(Asked(quick))
    assert {finding.verdict for finding in findings} == {"ok"}
    names = [finding.data["name"] for finding in findings if finding.id == "gpu.device"]
    assert names == ["Fake 4060", "Fake 3060"]
    rates = [finding.data["memory_bytes_per_second"] for finding in findings if finding.id == "gpu.device"]
    assert rates == [pytest.approx(272e9, rel=0.001)] * 2, "of a memory of 17 Gbit/s on 128 lines, as NVIDIA states it"
    (use,) = [finding for finding in findings if finding.id == "gpu.use"]
    assert use.data["usable"]
    assert use.data["name"] == "Fake 4060"
    assert use.data["free"] == (
        8 * GIB - gpu.CONTEXT_BYTES if quick else 7 * GIB
    )  # the other library's, with a context


CASES = [
    # what the library does, id, verdict, in the value, in the mend
    ("old", "gpu.driver", "bad", "535.183.01, with CUDA 12.2; PyTorch is built for 13.0", "580 or newer"),
    ("old", "gpu.use", "bad", "its driver knows CUDA 12.2, PyTorch is built for 13.0", "580 or newer"),
    ("narrow", "gpu.link", "warn", "PCIe 1 x4, the card's best is 4 x8", "seat the card anew"),
    ("hot", "gpu.clocks", "warn", "held down by heat", "cooling"),
    ("capped", "gpu.clocks", "note", "60 W of the usual 115 W", "nvidia-smi -pl 115"),
    ("ancient", "gpu.use", "warn", "compute capability 7.5, 8.0 is needed", ""),
    ("wsl", "gpu.memory", "ok", "8.0 GiB of 8.0 GiB free", ""),
    ("garbles", "gpu.device", "ok", "Fake 4060", ""),
]


@pytest.mark.parametrize(("word", "id", "verdict", "value", "mend"), CASES)
def test_what_the_driver_tells(nvidia, torch_13, word: str, id: str, verdict: str, value: str, mend: str) -> None:
    nvidia(word)
    finding = found()[id]
    assert finding.verdict == verdict
    assert value in finding.value
    assert mend in finding.mend


def test_a_machine_on_which_triton_cannot_compile(nvidia, torch_13, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia()
    monkeypatch.setenv("CC", "no-such-compiler")
    finding = found()["gpu.use"]
    assert (finding.verdict, finding.data["usable"]) == ("bad", False)
    assert "CC, which is 'no-such-compiler'" in finding.value
    assert finding.mend == "unset CC, or name a C compiler"


def test_who_holds_the_memory(nvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia("held")
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        monkeypatch.setenv("FAKE_NVML_PID", str(holder.pid))
        finding = found()["gpu.memory"]
    finally:
        holder.kill()
        holder.wait()
    assert finding.verdict == "warn"
    (told,) = finding.data["holders"]
    assert (told["pid"], told["bytes"]) == (holder.pid, 5 * GIB)
    assert "python" in told["name"]
    assert f"(pid {holder.pid}, 5.0 GiB)" in finding.value


def test_a_torch_without_cuda(nvidia, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "cpu" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("cuda: Optional[str] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    nvidia()
    findings = found()
    assert findings["gpu.driver"].verdict == "warn"
    assert findings["gpu.use"].verdict == "bad"
    assert "without CUDA" in findings["gpu.use"].value
    assert findings["gpu.use"].mend == findings["gpu.driver"].mend == engine.CUDA_BUILD


def test_hidden_gpus(nvidia, torch_13, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert found()["gpu.use"].mend == "unset CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert found()["gpu.use"].data["name"] == "Fake 3060"


@pytest.mark.parametrize(
    ("nvml", "cuda", "limit", "kept"), [("hangs", "hangs", 2.0, set()), ("hangs later", "answers", 3.0, {"gpu.driver"})]
)
def test_calls_that_block(nvidia, nvml: str, cuda: str, limit: float, kept: set[str]) -> None:
    """What was told before the call that hangs is kept, and the process inside of it is ended."""
    nvidia(nvml, cuda)
    began = time.monotonic()
    findings = found(Asked(), limit)
    assert time.monotonic() - began < limit + 20
    assert kept <= set(findings)
    assert findings["gpu.answer"].verdict == "bad"
    assert f"hangs: no answer within {limit:.2g} s" in findings["gpu.answer"].value
    assert not children_left()


def test_a_call_that_blocks_where_time_is_short(nvidia) -> None:
    """A driver that has slept may need longer: what it would cost is said, and what waits longer."""
    nvidia("hangs", "hangs")
    (finding,) = findings_of(QUICK, 2.0)
    assert (finding.id, finding.verdict) == ("gpu.answer", "warn")
    assert finding.value == "not known: the NVIDIA driver gave no answer within 2 s"
    assert "a server waits for it at every start and computes on the CPU" in finding.cost
    assert finding.mend == "ft doctor"


def test_cuda_hangs_and_the_library_does_not(nvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRIVER_SECONDS", 0.5)  # of this process, in which the probe runs here
    nvidia("", "hangs")
    refused = gpu.use(gpu.System(), [], [], None, quick=False)
    assert refused.verdict == "bad"
    assert "does not answer within 0.5 s" in refused.value
    assert "nvidia-smi" in refused.mend


@pytest.mark.parametrize(("word", "reason"), [("crashes", "status -6"), ("mismatch", "version mismatch")])
def test_a_driver_out_of_order_is_a_finding(nvidia, word: str, reason: str) -> None:
    """Without a card on the bus a library that refuses is as good as none."""
    nvidia(word)
    findings = found()
    if word == "crashes":
        assert reason in findings["gpu.answer"].value
    else:
        card = pci.Card("0000:01:00.0", pci.NVIDIA, None)
        told = gpu.not_told(gpu.System(), [card], nvml.NotTold(f"the NVIDIA driver fails: {reason}"))
        assert told.verdict == "bad"
        assert "restart" in told.mend
        assert findings["gpu.use"].data["usable"] is False


def test_a_card_without_a_driver(tree, tmp_path: Path) -> None:
    """A card on the bus, and libraries that are none."""
    card = pci.Card("0000:01:00.0", pci.NVIDIA, None)
    error = nvml.NotTold("the NVIDIA driver is not installed (libnvidia-ml.so.1 is not found)")
    told = gpu.not_told(tree({}), [card], error)
    assert told.verdict == "bad"
    assert "0000:01:00.0" in told.value
    assert "install the NVIDIA driver" in told.mend
    refused = gpu.use(tree({}), [card], [], None, quick=True)
    assert refused.verdict == "bad"
    inside = tree({"proc/sys/kernel/osrelease": "6.1-microsoft-standard-WSL2"})
    assert "Windows" in gpu.not_told(inside, [card], error).mend


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tmp_path / library).write_text("")  # found first, and no library
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if any(card.vendor == pci.NVIDIA for card in pci.cards(gpu.System())):
        pytest.skip("there is a GPU here")
    findings = found()
    assert set(findings) == {"gpu.use"}
    assert findings["gpu.use"].verdict == "note"


def test_the_rest_is_told_while_the_driver_hangs(nvidia, ft_home: Path) -> None:
    nvidia("hangs", "hangs")
    looks: list[list[Finding]] = []
    assert quickest(lambda: seconds(lambda: looks.append(examine(QUICK))), 1.8) < 1.8
    findings = looks[-1]
    groups = {finding.group for finding in findings}
    assert {"cpu", "memory", "disk", "gpu", "software", "server", "store"} <= groups
    assert not children_left()


def children_left() -> list[str]:
    import psutil

    deadline = time.monotonic() + 30
    while True:
        left = [
            process
            for process in psutil.Process(os.getpid()).children(recursive=True)
            if "ftlaunch.machine.child" in " ".join(_command(process))
        ]
        if not left or time.monotonic() > deadline:
            return [str(process) for process in left]
        time.sleep(0.05)


def _command(process) -> list[str]:
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_fit_says_that_the_driver_hangs(
    nvidia, demo_model: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not only answer as if there were no GPU."""
    nvidia("hangs", "hangs")
    assert main(["show", str(demo_model), "--fit"]) == EXIT["bad"]
    out = capsys.readouterr().out
    assert "the NVIDIA driver hangs: no answer within" in out
    assert "on the CPU" in out
