"""What the two lanes of missing experts cost on this machine: from profile.json, else from the doctor's own figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftengine.experts.split import LaneCosts
from ftengine.models.gpu.strategy import Lanes

MOST_BYTES = 1 << 20
HANDSHAKE = 6.0  # microseconds, where it was not measured


def kept(folder: Path, gpu: str, wanted: Mapping[str, Any]) -> Lanes | None:
    """The newest measurement in `folder`/profile.json with a GPU of that name, whose key has all of `wanted`."""
    try:
        with (folder / "profile.json").open("rb") as file:
            content = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    entries = content.get("lanes") if isinstance(content, dict) and content.get("version") == 1 else None
    for entry in entries if isinstance(entries, list) else []:
        try:
            key = entry["key"]
            if key["gpu"].startswith(f"{gpu}, ") and all(key[name] == value for name, value in wanted.items()):
                return _of_entry(entry)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # damaged, or of a machine without a link
    return None


def measured(known: Mapping[str, Mapping[str, Any]], expert_bytes: int) -> Lanes | None:
    """Of experts of that size, from what `ft doctor` measured: bandwidths, without the lanes' fixed costs."""
    link = known.get("gpu.gather", {}).get("bytes_per_second")
    lanes = known.get("gpu.lanes", {})
    cpu, together = lanes.get("cpu_bytes_per_second"), lanes.get("together_bytes_per_second")
    if not (link and cpu and together and expert_bytes):
        return None
    return of_rates(link, cpu, together, expert_bytes, float(lanes.get("handshake_us") or HANDSHAKE))


def of_rates(link: float, cpu: float, together: float, expert_bytes: int, handshake: float = HANDSHAKE) -> Lanes:
    """Bytes a second: of each lane alone, and of both at once."""
    shared = min(1.0, together / (link + cpu))  # both read the same memory

    def us(rate: float) -> float:
        return expert_bytes / rate * 1e6

    alone = LaneCosts(0.0, us(link), 0.0, us(cpu))
    beside = LaneCosts(0.0, us(link * shared), 0.0, us(cpu * shared))
    return Lanes(alone, beside, handshake)


def _of_entry(entry: Mapping[str, Any]) -> Lanes:
    def pair(name: str) -> tuple[float, float]:
        return float(entry[name]["a_us"]), float(entry[name]["b_us"])

    alone = LaneCosts(*pair("link"), *pair("cpu"))
    return Lanes(alone, LaneCosts(*pair("link_beside"), *pair("cpu_beside")), float(entry["handshake_us"]))
