"""Graphics cards on the PCI bus and the links that they are on, as the kernel lists them: no driver is asked.

Attributes: Documentation/ABI/testing/sysfs-bus-pci of the kernel. Rates: PCI Express Base Specification, bytes of one
lane after the line code and before packet headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, rate

FOLDER = "sys/bus/pci/devices"
NVIDIA = 0x10DE
DISPLAY = 0x03  # base class; 0x0302 are cards without an output
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
SPEEDS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s
WIDEST = 32  # what is above is what a card that sleeps answers


@dataclass(frozen=True)
class Link:
    """generation, width: as trained now; most_*: of the card; slot_*: of the slot, None where it is not known.

    A card that rests falls back to a slow generation and comes back when it works; the width stays.
    """

    generation: int
    width: int
    most_generation: int
    most_width: int
    slot_generation: int | None = None
    slot_width: int | None = None

    @property
    def best(self) -> float:
        """Bytes a second that this width can carry at the best generation of card and slot."""
        return self.width * LANE[min(self.most_generation, self.slot_generation or self.most_generation)]

    @property
    def full(self) -> float:
        """Bytes a second of the card in a slot of its kind."""
        return self.most_width * LANE[self.most_generation]

    def data(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "width": self.width,
            "max_generation": self.most_generation,
            "max_width": self.most_width,
            "slot_generation": self.slot_generation,
            "slot_width": self.slot_width,
            "best_bytes_per_second": self.best,
            "full_bytes_per_second": self.full,
        }


@dataclass(frozen=True)
class Card:
    address: str  # 0000:01:00.0
    vendor: int
    link: Link | None


def cards(system: System) -> list[Card]:
    found = []
    for path in system.names(FOLDER, "*"):
        vendor, kind = (_hex(system.text(f"{path}/{name}")) for name in ("vendor", "class"))
        if kind is not None and kind >> 16 == DISPLAY and vendor is not None:
            found.append(Card(Path(path).name, vendor, link(system, Path(path).name)))
    return found


def link(system: System, address: str) -> Link | None:
    """None where the kernel does not tell, as under WSL 2 and in many virtual machines."""
    own = f"{FOLDER}/{address.lower()}"
    generation, width = _pair(system, own, "current")
    most_generation, most_width = _pair(system, own, "max")
    if not (generation and width and most_generation and most_width):
        return None
    above = system.path(own).resolve().parent
    try:
        slot = _pair(system, str(above.relative_to(system.root.resolve())), "max")
    except ValueError:
        slot = (None, None)
    return Link(generation, width, most_generation, most_width, *slot)


def finding(link: Link, label: str, data: dict[str, Any]) -> Finding:
    """Of what the link was trained to. The generation is judged when the link is measured, under load."""
    value = f"PCIe {link.generation} x{link.width}, the card's best is {link.most_generation} x{link.most_width}"
    if link.generation < link.most_generation:
        value += " (a card that rests slows its link down)"
    data = {**data, **link.data()}
    if link.width >= link.most_width:
        return Finding("gpu.link", label, value, data=data)
    cost = f"experts cross the link at {rate(link.best)} at most, of {rate(link.full)}"
    if link.slot_width and link.slot_width <= link.width:
        mend = f"the slot has {link.slot_width} lanes: put the card into one with {link.most_width}"
    else:
        mend = "seat the card anew, without a riser; look for lane sharing (M.2, bifurcation) in the firmware's setup"
    return Finding("gpu.link", label, value, "warn", cost, mend, data)


def _pair(system: System, path: str, which: str) -> tuple[int | None, int | None]:
    """Generation and width."""
    speed = system.text(f"{path}/{which}_link_speed").partition(" ")[0]
    width = system.number(f"{path}/{which}_link_width")
    return SPEEDS.get(speed), width if width and 0 < width <= WIDEST else None


def _hex(text: str) -> int | None:
    try:
        return int(text, 16)
    except ValueError:
        return None
