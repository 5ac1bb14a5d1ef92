"""Memory modules out of udev's database and the firmware's table: the same machine told both ways, and bad tables."""

from __future__ import annotations

import random

import pytest

from ftlaunch.machine import modules
from ftlaunch.machine.modules import DMI, UDEV, Module, peak
from tests.machine.boards import CROWDED, DUAL, GIB, SERVER, SINGLE, SLOW, Slot, smbios, udev

MACHINES = [
    # slots, channels, GB/s, verdict, in the mend
    (DUAL, 2, 89.6, "ok", ""),
    (SINGLE, 1, 25.6, "warn", "put a second module of the same kind into P0 CHANNEL B DIMM 0"),
    (CROWDED, 1, 25.6, "warn", "put one of the modules into P0 CHANNEL B DIMM 0"),
    (SLOW, 2, 76.8, "warn", "XMP or EXPO"),
    (SERVER, 8, 307.2, "ok", ""),
]


@pytest.mark.parametrize("source", ["udev", "firmware"])
@pytest.mark.parametrize(("slots", "channels", "gigabytes", "verdict", "mend"), MACHINES)
def test_machines(
    tree, source: str, slots: list[Slot], channels: int, gigabytes: float, verdict: str, mend: str
) -> None:
    system = tree({UDEV: udev(slots)} if source == "udev" else {DMI: smbios(slots)})
    found = modules.modules_finding(system)
    assert found.data["channels"] == channels
    assert found.data["peak_bytes_per_second"] == pytest.approx(gigabytes * 1e9)
    assert found.data["slots"] == len(slots)
    assert found.verdict == verdict
    assert mend in found.mend
    assert [module.bytes for module in modules.modules(system)] == [slot.gib * GIB for slot in slots]


def test_a_large_module_is_told_by_the_second_field(tree) -> None:
    slot = Slot("", "DIMM_A1", 128, 4800, 4400)
    (found,) = modules.modules(tree({DMI: smbios([slot])}))
    assert found == Module("DIMM_A1", 128 * GIB, "DDR5", 4800, 4400, 8)


def test_channels_without_names_count_one_a_module() -> None:
    found = [Module(f"Slot {number}", GIB, "DDR4", 3200, 3200) for number in range(2)]
    assert peak(found) == pytest.approx(2 * 8 * 3200e6)
    assert peak([Module("Slot 0", GIB)]) is None
    assert peak([]) is None


def test_what_is_not_told(tree) -> None:
    virtual = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu hypervisor\n"}
    assert modules.modules_finding(tree(virtual)).value == "not told to a virtual machine"


def test_without_root(tree) -> None:
    found = modules.modules_finding(tree({}))
    assert found.verdict == "note"
    assert found.mend == "sudo dmidecode -t memory"


def test_damaged_tables(tree) -> None:
    """Firmware is known for them: any bytes give modules or none, and end."""
    generator, table = random.Random(7), smbios(CROWDED)
    for _ in range(100):
        damaged = bytearray(table[: generator.randrange(len(table))])
        for _ in range(3):
            if damaged:
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        modules.modules_finding(tree({DMI: bytes(damaged)}))
