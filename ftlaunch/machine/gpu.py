"""GPUs: those on the bus, what their driver tells, and whether the engine uses one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ftengine.memory import gpu as engine
from ftengine.memory.gpu import Gpu as Usable
from ftengine.memory.gpu import NoGpu
from ftlaunch.machine import nvml, pci
from ftlaunch.machine.gpu_holders import held
from ftlaunch.machine.gpu_silence import DRIVER
from ftlaunch.machine.probe import Asked, Waits
from ftlaunch.machine.software import torch_cuda
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, gib

LIBRARY = "libnvidia-ml.so.1"
DRIVER_SECONDS = 4.5
CONTEXT_BYTES = 400 << 20  # that CUDA takes before the engine gets any, about
INSTALL = "install the NVIDIA driver: sudo ubuntu-drivers install, or your distribution's way"
ON_WSL = "install the NVIDIA driver for Windows, not one in WSL"
IN_CONTAINER = "docker run --gpus all, with the NVIDIA container toolkit"


def probe(asked: Asked) -> Iterator[Finding | Waits]:
    if _can_be_loaded(LIBRARY):
        yield Waits(DRIVER)
    system = System()
    cards = [card for card in pci.cards(system) if card.vendor == pci.NVIDIA]
    for number, card in enumerate(cards):
        if card.link is not None:
            yield pci.finding(card.link, _label("link", number, len(cards)), {"gpu": number, "address": card.address})
    found: list[nvml.Gpu] = []
    driver: nvml.Driver | None = None
    try:
        library = nvml.Library()
        driver = library.driver()
        yield driver_finding(driver, torch_cuda())
        for gpu in library.gpus():
            found.append(gpu)
            yield from of_gpu(gpu, any(card.address == gpu.address and card.link for card in cards))
    except nvml.NotTold as error:
        if cards or error.package:
            yield not_told(system, cards, error)
    yield use(system, cards, found, driver, asked.quick)


def driver_finding(driver: nvml.Driver, torch: str | None) -> Finding:
    """Against what PyTorch was built for: any driver of the same major version of CUDA will do."""
    has = None if driver.cuda is None else engine.dotted(driver.cuda)
    value = f"{driver.version}, with CUDA {has or 'of unknown version'}; PyTorch is built for {torch or 'the CPU'}"
    data = {"version": driver.version, "cuda": has, "torch_cuda": torch}
    if torch is None:
        cost = "the GPU is not used"
        return Finding("gpu.driver", "driver", value, "warn", cost, engine.CUDA_BUILD, data)
    if engine.is_old(driver.cuda, torch):
        cost = "too old for it: the GPU cannot be used"
        return Finding("gpu.driver", "driver", value, "bad", cost, engine.newer_driver(torch), data)
    return Finding("gpu.driver", "driver", value, data=data)


def of_gpu(gpu: nvml.Gpu, link_told: bool) -> Iterator[Finding]:
    data: dict[str, Any] = {"gpu": gpu.index, "name": gpu.name}
    number = f"GPU {gpu.index}" if gpu.index else "GPU"
    capability = None if gpu.capability is None else ".".join(map(str, gpu.capability))
    value = f"{gpu.name}, compute capability {capability or 'unknown'}"
    told = {"capability": capability, "uuid": gpu.uuid, "memory_bytes_per_second": gpu.memory_rate}
    yield Finding("gpu.device", number, value, data=data | told)
    yield held(gpu, data)
    if gpu.link is not None and not link_told:
        label = f"link of {number}" if gpu.index else "link"
        yield pci.finding(pci.Link(*gpu.link), label, {**data, "address": gpu.address})
    yield speed(gpu, data)


def speed(gpu: nvml.Gpu, data: dict[str, Any]) -> Finding:
    """What slows the GPU itself down now."""
    data = {**data, "reasons": gpu.slowed, "power_limit_mw": gpu.power_limit, "usual_limit_mw": gpu.usual_limit}
    cost, label = "prompts are computed slower", f"clocks of GPU {gpu.index}" if gpu.index else "clocks"
    for bit, (reason, mend) in nvml.SLOWED.items():
        if gpu.slowed & bit:
            return Finding("gpu.clocks", label, f"held down by {reason}", "warn", cost, mend, data)
    if gpu.power_limit and gpu.usual_limit and gpu.power_limit < 0.8 * gpu.usual_limit:
        value = f"{gpu.power_limit / 1e3:.0f} W of the usual {gpu.usual_limit / 1e3:.0f} W"
        mend = f"sudo nvidia-smi -pl {gpu.usual_limit // 1000}"
        return Finding("gpu.clocks", label, value, "note", cost, mend, data)
    return Finding("gpu.clocks", label, "nothing holds them down", data=data)


def not_told(system: System, cards: list[pci.Card], error: nvml.NotTold) -> Finding:
    data = {"cards": [card.address for card in cards]}
    if error.package:
        cost = "who holds its memory, and what slows it down, is not told"
        return Finding("gpu.library", "library", str(error), "note", cost, "pip install nvidia-ml-py", data)
    where = f"an NVIDIA card is at {cards[0].address}, but " if cards else ""
    mismatch = "mismatch" in str(error)
    mend = "restart the machine: the driver was updated" if mismatch else _install(system)
    return Finding("gpu.library", "library", f"{where}{error}", "bad", "the GPU is not used", mend, data)


def use(
    system: System, cards: list[pci.Card], found: list[nvml.Gpu], driver: nvml.Driver | None, quick: bool
) -> Finding:
    """What `ft serve --device auto` would decide: asked of CUDA itself, or with --quick by what the driver tells."""
    gpu, torch = _by_driver(found, driver) if quick else engine.probe(DRIVER_SECONDS), torch_cuda()
    lacking = engine.unusable(gpu, torch)
    data: dict[str, Any] = {"usable": lacking is None, "name": None, "total": None, "free": None}
    if isinstance(gpu, Usable):
        data |= {"name": gpu.name, "total": gpu.total, "free": gpu.free, "capability": list(gpu.capability)}
    if lacking is None:
        assert isinstance(gpu, Usable)
        value = f"{gpu.name}, {'about ' if quick else ''}{gib(gpu.free)} of {gib(gpu.total)} for the engine"
        return Finding("gpu.use", "used", value, data=data)
    finding, cost = Finding("gpu.use", "used", f"none: {lacking.reason}", data=data), "the CPU computes everything"
    if not cards and not found and "no NVIDIA driver" in lacking.reason:
        return replace(finding, value="none: there is no NVIDIA GPU").but("note", cost)
    if isinstance(gpu, Usable) and gpu.capability < engine.LEAST_CAPABILITY:
        return finding.but("warn", cost)
    if isinstance(gpu, NoGpu) and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return finding.but("bad", cost, "unset CUDA_VISIBLE_DEVICES")
    return finding.but("bad", cost, lacking.mend or _mend(system, lacking.reason))


def _mend(system: System, reason: str) -> str:
    """Where the driver shows no GPU. reason: as it was told."""
    if "no NVIDIA driver" in reason:
        return _install(system)
    return "nvidia-smi may tell more; after an update of the driver restart the machine"


def _by_driver(found: list[nvml.Gpu], driver: nvml.Driver | None) -> Usable | NoGpu:
    """The first that CUDA_VISIBLE_DEVICES leaves, as far as numbers in it tell."""
    if not found or driver is None:
        return NoGpu("no NVIDIA driver is installed, or it shows no GPU")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    gpu = next((gpu for gpu in found if chosen in (str(gpu.index), gpu.uuid)), None)
    if gpu is None:
        return NoGpu(f"CUDA_VISIBLE_DEVICES is {chosen!r}, which shows no GPU")
    free = max(0, gpu.free - CONTEXT_BYTES)
    return Usable(gpu.name, gpu.capability or (0, 0), gpu.total, free, driver.cuda or 0, len(found))


def _can_be_loaded(library: str) -> bool:
    """Whether it is there to be asked. Nothing of it is called yet."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _install(system: System) -> str:
    if system.wsl:
        return ON_WSL
    return IN_CONTAINER if system.path(".dockerenv").exists() else INSTALL


def _label(name: str, number: int, count: int) -> str:
    return name if count == 1 or not number else f"{name} of GPU {number}"
