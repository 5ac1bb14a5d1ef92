"""Memory modules and their channels: from udev's database, which everybody may read, or the firmware's own table.

The formats: systemd's src/udev/dmi_memory_id (MEMORY_DEVICE_<n>_...), and DMTF's SMBIOS 3.7, section 7.18, type 17.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, gib, plural, rate

UDEV, DMI = "run/udev/data/+dmi:id", "sys/firmware/dmi/tables/DMI"
WIDTH = 8  # bytes that one module moves at a time; of DDR5 two halves of four
CHANNEL = re.compile(r"channel\s*_?([a-z0-9]+)|\bdimm_?([a-h])\d?\b", re.IGNORECASE)
TYPES = {24: "DDR3", 26: "DDR4", 27: "LPDDR", 28: "LPDDR2", 29: "LPDDR3", 30: "LPDDR4", 34: "DDR5", 35: "LPDDR5"}
UNKNOWN = (0, 0xFFFF)
END, DEVICE = 127, 17


@dataclass(frozen=True)
class Module:
    """A place for a module. bytes: 0 where it is empty. rated, speed: million transfers a second, 0 if not told."""

    place: str
    bytes: int
    type: str = ""
    rated: int = 0
    speed: int = 0
    width: int = WIDTH  # bytes

    @property
    def channel(self) -> str | None:
        """As the board's maker names it."""
        found = CHANNEL.search(self.place)
        return (found.group(1) or found.group(2)).upper() if found else None

    @property
    def peak(self) -> float:
        """Bytes a second."""
        return self.width * self.speed * 1e6


def modules(system: System) -> list[Module]:
    """Filled places and empty ones; none where the system does not tell."""
    return list(_udev(system.text(UDEV))) or list(_smbios(system.raw(DMI)))


def peak(found: list[Module]) -> float | None:
    """Bytes a second that all channels can move together; None where speeds are not told. Modules in places whose
    channel is not named count as one each, so that the true figure may be lower.
    """
    filled = [module for module in found if module.bytes]
    if not filled or not all(module.speed for module in filled):
        return None
    channels: dict[str, float] = {}
    for number, module in enumerate(filled):
        key = _controller(module) + (module.channel or f"?{number}")
        channels[key] = max(channels.get(key, 0.0), module.peak)
    return sum(channels.values())


def modules_finding(system: System) -> Finding:
    found = modules(system)
    filled = [module for module in found if module.bytes]
    highest = peak(found)
    data = {
        "slots": len(found) or None,
        "filled": len(filled) or None,
        "channels": len({_controller(m) + m.channel for m in filled if m.channel}) or None,
        "rated_mts": min((m.rated for m in filled if m.rated), default=None),
        "speed_mts": min((m.speed for m in filled if m.speed), default=None),
        "peak_bytes_per_second": highest,
    }
    if not filled or not highest:
        if system.virtual or system.wsl:
            return Finding("memory.modules", "modules", "not told to a virtual machine", data=data)
        finding = Finding("memory.modules", "modules", "not told without root", data=data)
        return finding.but("note", "", "sudo dmidecode -t memory")
    slowest = min(filled, key=lambda module: module.speed)
    value = f"{len(filled)} of {plural(len(found), 'slot')}: {' + '.join(gib(m.bytes) for m in filled[:4])}"
    value += f"{' + ...' if len(filled) > 4 else ''}, {slowest.type} at {slowest.speed} MT/s, at most {rate(highest)}"
    finding = Finding("memory.modules", "modules", value, data=data)
    single = _single(found, filled)
    if single:
        cost = "half of the read bandwidth: experts on the CPU, and over the link, take up to twice the time"
        return finding.but("warn", cost, single)
    if slowest.rated > 1.05 * slowest.speed:
        cost = f"{1 - slowest.speed / slowest.rated:.0%} of the bandwidth of modules made for {slowest.rated} MT/s"
        return finding.but("warn", cost, "turn XMP or EXPO on in the firmware's setup")
    return finding


def _single(found: list[Module], filled: list[Module]) -> str:
    """What helps where all modules sit on one channel though there are more; empty otherwise."""
    empty = [module for module in found if not module.bytes]
    used = {_controller(module) + module.channel for module in filled if module.channel}
    others = [m for m in empty if m.channel and _controller(m) + m.channel not in used]
    if len(filled) == 1 and empty:
        return f"put a second module of the same kind into {(others or empty)[0].place}"
    if len(used) == 1 and others and all(module.channel for module in filled):
        return f"put one of the modules into {others[0].place}"
    return ""


def _controller(module: Module) -> str:
    """Of boards that name channels anew on each processor or controller."""
    found = re.search(r"\b(P\d+|CPU\s?\d+|NODE\s?\d+|Controller\s?\d+)", module.place, re.IGNORECASE)
    return f"{found.group(1).upper()} " if found else ""


def _udev(text: str) -> Iterator[Module]:
    facts: dict[int, dict[str, str]] = {}
    for number, name, value in re.findall(r"^E:MEMORY_DEVICE_(\d+)_(\w+)=(.*)$", text, re.MULTILINE):
        facts.setdefault(int(number), {})[name] = value
    for _, device in sorted(facts.items()):

        def number_of(name: str, device: dict[str, str] = device) -> int:
            value = device.get(name, "")
            return int(value) if value.isdecimal() else 0

        place = " ".join(filter(None, (device.get("BANK_LOCATOR"), device.get("LOCATOR"))))
        rated = number_of("SPEED_MTS")
        yield Module(
            place,
            number_of("SIZE"),
            device.get("TYPE", ""),
            rated,
            number_of("CONFIGURED_SPEED_MTS") or rated,
            number_of("DATA_WIDTH") // 8 or WIDTH,
        )


def _smbios(table: bytes) -> Iterator[Module]:
    """Structures one after the other: type, length, handle, fields, then strings that two zeros end."""
    at = 0
    while at + 4 <= len(table) and table[at] != END and table[at + 1] >= 4:
        kind, length = table[at], table[at + 1]
        end = table.find(b"\0\0", at + length)
        if end < 0:
            return
        if kind == DEVICE and length >= 0x15:
            yield _device(table[at : at + length], table[at + length : end].split(b"\0"))
        at = end + 2


def _device(fields: bytes, strings: list[bytes]) -> Module:
    def word(offset: int, bytes_: int = 2) -> int:
        part = fields[offset : offset + bytes_]
        return int.from_bytes(part, "little") if len(part) == bytes_ else 0

    def name(offset: int) -> str:
        index = fields[offset] - 1
        return strings[index].decode(errors="replace").strip() if 0 <= index < len(strings) else ""

    size, extended = word(0x0C), word(0x1C, 4) & 0x7FFFFFFF
    if size == 0x7FFF:
        total = extended << 20
    elif size in UNKNOWN:
        total = 0
    else:
        total = (size & 0x7FFF) << (10 if size & 0x8000 else 20)
    rated, speed = (0 if word(place) in UNKNOWN else word(place) for place in (0x15, 0x20))
    width = 0 if word(0x0A) in UNKNOWN else word(0x0A) // 8
    place = " ".join(filter(None, (name(0x11), name(0x10))))
    return Module(place, total, TYPES.get(fields[0x12], ""), rated, speed or rated, width or WIDTH)
