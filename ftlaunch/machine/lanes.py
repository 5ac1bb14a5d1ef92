"""What the two lanes of missing experts cost on this machine: from profile.json, else from the doctor's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftengine.experts.profile import find
from ftengine.experts.profile_key import Known
from ftengine.experts.split import LaneCosts
from ftengine.models.gpu.strategy import Lanes

HANDSHAKE = 6.0  # microseconds, where it was not measured
# Where nothing was: what lanes take beside the bytes, microseconds; docs/fit.md tells of which machine
ASSUMED_LINK, ASSUMED_CPU, ASSUMED_HANDSHAKE = 4.0, 25.0, 18.0


def kept(folder: Path, wanted: Known) -> tuple[Lanes | None, str]:
    """By the newest measurement in `folder`/profile.json for `wanted`, as the engine looks for it.

    Where there is none: why what the file holds is not used, a clause; empty where it holds nothing.
    """
    found, aside = find(folder, wanted)
    if found is None:
        return None, aside
    link, cpu, together = found.link, found.cpu, found.costs
    if link is None or together is None:
        return None, "was measured where the GPU could not read the experts"
    return Lanes(LaneCosts(link.a_us, link.b_us, cpu.a_us, cpu.b_us), together, found.handshake_us), ""


def measured(known: Mapping[str, Mapping[str, Any]], expert_bytes: int, threads: int) -> Lanes | None:
    """Of experts of that size, from what `ft doctor` measured with so many threads: bandwidths of experts in memory of
    its own, which a CPU reads faster than a model's.
    """
    link = known.get("gpu.gather", {}).get("bytes_per_second")
    lanes = known.get("gpu.lanes", {})
    cpu, together = lanes.get("cpu_bytes_per_second"), lanes.get("together_bytes_per_second")
    if not (link and cpu and together and expert_bytes) or lanes.get("threads", threads) != threads:
        return None
    handshake = float(lanes.get("handshake_us") or HANDSHAKE)
    return _of_rates((0.0, link), (ASSUMED_CPU, cpu), together, expert_bytes, handshake)


def assumed(link: float, cpu: float, together: float, expert_bytes: int) -> Lanes:
    """Where neither engine nor doctor has measured them. Bytes a second: what the link and the CPU's threads could
    read, each alone, and both at once.
    """
    return _of_rates((ASSUMED_LINK, link), (ASSUMED_CPU, cpu), together, expert_bytes, ASSUMED_HANDSHAKE)


def _of_rates(
    link: tuple[float, float], cpu: tuple[float, float], together: float, expert_bytes: int, handshake: float
) -> Lanes:
    """link, cpu: microseconds that a layer takes beside its bytes, and bytes a second."""
    (a_link, link_rate), (a_cpu, cpu_rate) = link, cpu
    shared = min(1.0, together / (link_rate + cpu_rate))  # both read the same memory

    def us(rate: float) -> float:
        return expert_bytes / rate * 1e6

    alone = LaneCosts(a_link, us(link_rate), a_cpu, us(cpu_rate))
    beside = LaneCosts(a_link, us(link_rate * shared), a_cpu, us(cpu_rate * shared))
    return Lanes(alone, beside, handshake, rough=True)
