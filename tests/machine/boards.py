"""Boards with their memory modules, told as udev's database and as the firmware's table tell them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Slot:
    bank: str
    place: str
    gib: int = 0
    rated: int = 0
    speed: int = 0
    kind: str = "DDR5"


DUAL = [
    Slot("BANK 0", "Controller0-ChannelA-DIMM0", 16, 5600, 5600),
    Slot("BANK 0", "Controller1-ChannelA-DIMM0", 16, 5600, 5600),
]
SINGLE = [Slot("P0 CHANNEL A", "DIMM 0", 16, 3200, 3200, "DDR4"), Slot("P0 CHANNEL B", "DIMM 0")]
CROWDED = [
    Slot("P0 CHANNEL A", "DIMM 0", 8, 3200, 3200, "DDR4"),
    Slot("P0 CHANNEL A", "DIMM 1", 8, 3200, 3200, "DDR4"),
    Slot("P0 CHANNEL B", "DIMM 0"),
    Slot("P0 CHANNEL B", "DIMM 1"),
]
SLOW = [Slot("BANK 1", "DIMM_A2", 16, 6000, 4800), Slot("BANK 3", "DIMM_B2", 16, 6000, 4800)]
SERVER = [Slot("", f"DIMM_{letter}1", 64, 4800, 4800) for letter in "ABCDEFGH"]


def udev(slots: list[Slot]) -> str:
    """As systemd's dmi_memory_id writes it."""
    lines = ["E:MEMORY_ARRAY_LOCATION=System Board Or Motherboard"]
    for number, slot in enumerate(slots):
        facts = {"LOCATOR": slot.place, "BANK_LOCATOR": slot.bank, "TYPE": slot.kind if slot.gib else "Unknown"}
        if slot.gib:
            facts |= {"SIZE": slot.gib * GIB, "DATA_WIDTH": 64, "TOTAL_WIDTH": 72}
            facts |= {"SPEED_MTS": slot.rated, "CONFIGURED_SPEED_MTS": slot.speed}
        else:
            facts["PRESENT"] = 0
        lines += [f"E:MEMORY_DEVICE_{number}_{name}={value}" for name, value in facts.items() if value != ""]
    return "\n".join([*lines, "V:1", ""])


def smbios(slots: list[Slot]) -> bytes:
    """A table of SMBIOS 3.2: a structure of another type, then type 17 of 0x54 bytes each, then the end."""
    table = struct.pack("<BBH", 0, 0x18, 0) + bytes(0x14) + b"Vendor\0\0"
    for number, slot in enumerate(slots):
        fields = bytearray(0x54)
        struct.pack_into("<BBH", fields, 0, 17, 0x54, 0x1100 + number)
        struct.pack_into("<HH", fields, 0x08, 72, 64)
        small = slot.gib * 1024 < 0x7FFF
        struct.pack_into("<H", fields, 0x0C, slot.gib * 1024 if small else 0x7FFF)
        strings = [slot.place, *([slot.bank] if slot.bank else [])]
        fields[0x10], fields[0x11] = 1, 2 if slot.bank else 0
        fields[0x12] = {"DDR4": 26, "DDR5": 34}[slot.kind]
        struct.pack_into("<H", fields, 0x15, slot.rated)
        struct.pack_into("<I", fields, 0x1C, 0 if small else slot.gib * 1024)
        struct.pack_into("<H", fields, 0x20, slot.speed)
        table += bytes(fields) + b"\0".join(text.encode() for text in strings) + b"\0\0"
    return table + struct.pack("<BBH", 127, 4, 0xFEFF) + b"\0\0"
