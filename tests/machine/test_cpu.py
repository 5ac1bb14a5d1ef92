"""The processor's findings, against trees of the files that the kernel's documentation describes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from ftlaunch.machine import cpu
from ftlaunch.machine.computing import Computing

FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq"
BASE = {
    f"{FREQUENCY}/cpuinfo_min_freq": "800000\n",
    f"{FREQUENCY}/cpuinfo_max_freq": "4500000\n",
    f"{FREQUENCY}/scaling_max_freq": "4500000\n",
}
TWO_CORES = """processor\t: 0
model name\t: Fake 9000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu hypervisor avx2

processor\t: 1
model name\t: Fake 9000
physical id\t: 0
core id\t\t: 0

processor\t: 2
physical id\t: 1
core id\t\t: 0
"""

CLOCKS = [
    # files, verdict, in the value, in the mend
    ({"scaling_governor": "schedutil", "scaling_driver": "acpi-cpufreq"}, "ok", "schedutil, up to 4.5 GHz", ""),
    ({"scaling_governor": "performance", "scaling_driver": "acpi-cpufreq"}, "ok", "performance", ""),
    ({"scaling_governor": "powersave", "scaling_driver": "acpi-cpufreq"}, "warn", "powersave", "cpupower"),
    ({"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}, "ok", "powersave", ""),
    (
        {
            "scaling_governor": "powersave",
            "scaling_driver": "amd-pstate-epp",
            "energy_performance_preference": "balance_performance",
        },
        "ok",
        "powersave, balance_performance",
        "",
    ),
    (
        {
            "scaling_governor": "powersave",
            "scaling_driver": "amd-pstate-epp",
            "energy_performance_preference": "power",
        },
        "warn",
        "powersave, power",
        "powerprofilesctl",
    ),
    (
        {"scaling_governor": "schedutil", "scaling_driver": "acpi-cpufreq", "scaling_max_freq": "2000000"},
        "warn",
        "up to 2.0 GHz",
        "cpupower frequency-set -u 4500000",
    ),
]


@pytest.mark.parametrize(("files", "verdict", "value", "mend"), CLOCKS)
def test_what_holds_the_clock_down(tree, files: dict[str, str], verdict: str, value: str, mend: str) -> None:
    system = tree({**BASE, **{f"{FREQUENCY}/{name}": f"{text}\n" for name, text in files.items()}})
    found = cpu.clock(system)
    assert found.verdict == verdict
    assert value in found.value
    assert mend in found.mend
    assert bool(found.cost) == (verdict == "warn")


@pytest.mark.parametrize(
    ("path", "text", "off"),
    [
        ("intel_pstate/no_turbo", "1", True),
        ("intel_pstate/no_turbo", "0", False),
        ("cpufreq/boost", "0", True),
        ("cpufreq/boost", "1", False),
    ],
)
def test_turbo(tree, path: str, text: str, off: bool) -> None:
    found = cpu.clock(tree({**BASE, f"sys/devices/system/cpu/{path}": text}))
    assert found.data["turbo"] is not off
    assert found.verdict == ("warn" if off else "ok")


def test_a_system_that_tells_nothing(tree) -> None:
    system = tree({})
    assert cpu.clock(system).value == "not told by the system"
    assert cpu.processor(system).data["cores"] >= 1
    assert cpu.load(system, Computing()).data["average"] is not None or os.name != "posix"


def test_cores_are_counted_once(tree) -> None:
    found = cpu.processor(tree({"proc/cpuinfo": TWO_CORES}))
    assert found.value.startswith("Fake 9000, 2 cores, 2 sockets, virtual")


def test_affinity_and_the_cgroup_take_cpus_away(tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    found = cpu.cpus(tree({}))
    assert (found.verdict, found.data["usable"]) == ("warn", 8)
    assert "50%" in found.cost
    limited = {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "200000 100000\n"}
    found = cpu.cpus(tree(limited))
    assert (found.verdict, found.data["usable"]) == ("warn", 2)
    assert "docker run --cpus 16" in found.mend


def test_a_forced_version_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_ISA", raising=False)
    assert cpu.instructions().verdict == "ok"
    monkeypatch.setenv("FT_ISA", "portable")
    assert cpu.instructions().verdict == "note"
    monkeypatch.setenv("FT_ISA", "avx9000")
    assert cpu.instructions().verdict == "bad"


def test_load_is_what_computes_now(tree) -> None:
    """Whatever the average of the last minute is; by the CPUs that it takes."""
    system = tree({"proc/loadavg": "9999.0 0.01 0.05 1/100 9\n"})
    rests = Computing(others=0.9, own=3.0, servers={"demo": 0.5}, programs={"sshd": 0.9}, cpus=4)
    found = cpu.load(system, rests)
    assert (found.verdict, found.value) == ("ok", "others take 0.9 of 4 CPUs now: sshd 0.9")
    assert (found.data["average"], found.data["others"], found.data["servers"]) == (9999.0, 0.9, {"demo": 0.5})
    found = cpu.load(system, replace(rests, others=1.0))
    assert (found.verdict, found.mend) == ("note", "end them; top shows more")
    assert found.cost.startswith("other programs compute: ")
    found = cpu.load(system, replace(rests, servers={"demo": 1.5, "idle": 0.1}))
    assert found.value == "others take 0.9 of 4 CPUs now: sshd 0.9; ft's server of demo takes 1.5"
    assert (found.verdict, found.cost) == ("note", "a server of ft computes: what is measured here is slower")
