"""Whether one model fits this machine, and how it would be served: `ft doctor --model`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftengine.config import EngineConfig
from ftengine.errors import ConfigError, FtError
from ftengine.experts import profile_key
from ftengine.kernels import native
from ftengine.kernels.choice import choose_kernels
from ftengine.memory.folders import cache_folder
from ftengine.memory.machine import ADDRESS_LIMIT, available_memory
from ftengine.memory.plan import lane_threads
from ftengine.models.gpu.strategy import Lanes
from ftlaunch import paths
from ftlaunch.machine import bundled, ignored, lanes, predict
from ftlaunch.machine.disk import nearest
from ftlaunch.machine.fit import Fit, Model, Room, fit, hits, read
from ftlaunch.machine.limits import ADDRESSES, UNLIMITED
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.software import torch_cuda
from ftlaunch.machine.verdict import Finding, gib


def probe(asked: Asked) -> Iterator[Finding]:
    assert asked.model is not None
    config = EngineConfig(asked.model) if asked.config is None else EngineConfig.from_json(asked.config)
    try:
        model = bundled.model(asked.model, config.dtype) if asked.bundled else read(Path(asked.model), config.dtype)
    except FtError as error:
        reason = str(error) if asked.to_fetch is None else str(error).replace(f"{asked.model}/", "")
        step = "choose another model" if asked.to_fetch is not None else getattr(error, "next_step", "") or "ft verify"
        yield Finding("model.files", "files", reason, "bad", "it cannot be served", step, {"path": asked.model})
        return
    if not asked.bundled:
        yield files(model) if asked.to_fetch is None else download(model, asked.to_fetch)
    room = room_of(asked)
    threads = lane_threads(config).value
    known, aside = lanes_here(model, room, asked, threads)
    found = fit(model, room, known, config)
    if known is None and found.fits and found.device == "cuda":  # a strategy is better told from bandwidths than not
        assumed = predict.assumed_lanes(model, predict.machine_of(asked, True, threads))
        found = fit(model, room, assumed, config)
    yield from findings(model, room, found, aside)
    if found.fits:
        yield predict.finding(model, found, asked, known)
        yield from ignored.findings(cache_folder())


def room_of(asked: Asked) -> Room:
    """This machine, as the probes before have found it."""
    memory, bound = available_memory()
    addresses = asked.known.get("limits.addresses", {}).get("bytes")
    if addresses is not None and addresses - ADDRESSES < memory:
        memory, bound = max(0, addresses - ADDRESSES), ADDRESS_LIMIT
    gpu, pin = asked.known.get("gpu.use", {}), asked.known.get("limits.pin", {})
    vram = int(gpu.get("free") or 0) if gpu.get("usable") else 0
    return Room(memory, bound, vram, str(gpu.get("name") or ""), pin.get("bytes"))


def known_lanes(model: Model, room: Room, asked: Asked, threads: int) -> Lanes | None:
    """What missing experts cost here with so many threads, where that is known: as the engine measured it, else the
    doctor.
    """
    found, _ = lanes_here(model, room, asked, threads)
    return found


def lanes_here(model: Model, room: Room, asked: Asked, threads: int) -> tuple[Lanes | None, str]:
    """`known_lanes`, and why it is not what profile.json holds, a clause; empty where that holds nothing."""
    layout = model.layout
    if not room.vram or layout is None:
        return None, ""
    memory = None if asked.quick else asked.known.get("gpu.use", {}).get("total")  # else not as CUDA tells it
    wanted = profile_key.known(
        layout,
        threads,
        model.dtype,
        gpu=profile_key.gpu_of(room.gpu, memory),
        driver=profile_key.driver_of(torch_cuda()),
        cpu=asked.known.get("cpu.processor", {}).get("name"),
        kernels=_kernels(),
    )
    kept, aside = lanes.kept(cache_folder(), wanted)
    return kept or lanes.measured(asked.known, model.sizes.block, min(threads, native.granted_threads())), aside


def _kernels() -> str | None:
    """The version that the engine would use; None where it would refuse to start."""
    try:
        return choose_kernels().value
    except ConfigError:
        return None


def files(model: Model) -> Finding:
    path = model.path
    stored = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())
    data = {"path": str(path), "bytes": stored, **_contents(model)}
    return Finding(
        "model.files", "files", f"{path.name}: {stored / 1e9:.1f} GB on the disk{_experts(model)}", data=data
    )


def download(model: Model, size: int) -> Finding:
    """Of one that is not here: whether the store's disk has room for it."""
    free = shutil.disk_usage(nearest(paths.models())).free
    data = {"path": None, "bytes": size, "disk_free": free, **_contents(model)}
    value = f"{size / 1e9:.1f} GB to fetch, {free / 1e9:.0f} GB are free{_experts(model)}"
    finding = Finding("model.files", "disk", value, data=data)
    if size < free:
        return finding
    return finding.but("bad", "it cannot be fetched", "free some, or FT_HOME on another disk")


def _contents(model: Model) -> dict[str, Any]:
    sizes = model.sizes
    counts = {"dense_bytes": sizes.dense, "expert_bytes": sizes.block, "experts": sizes.total}
    return {"architecture": model.architecture, **counts}


def _experts(model: Model) -> str:
    sizes = model.sizes
    return f"; {sizes.total} experts of {sizes.block / 1e6:.2f} MB" if sizes.total else ""


def findings(model: Model, room: Room, found: Fit, aside: str = "") -> Iterator[Finding]:
    """aside: why what profile.json holds is not used, a clause."""
    yield memory(room, found)
    if not found.fits:
        return
    if room.vram:
        yield vram(model, room, found)
    if found.device == "cuda":
        yield pinned(room, found)
    yield strategy(model, found, aside)
    yield context(model, found)


def memory(room: Room, found: Fit) -> Finding:
    data = {"needed": found.memory, "available": room.memory, "fits": found.fits, "reason": found.reason or None}
    if found.fits:
        value = f"needs about {gib(found.memory)} of {gib(room.memory)} available"
        finding = Finding("model.memory", "memory", value, data=data)
        if found.memory <= room.memory:
            return finding
        return finding.but("warn", "it fits only just: the system may swap, or end a program", "close other programs")
    smaller = "close other programs, or take a smaller form: ft show NAME --fit tells of it before a pull"
    mend = found.next_step if found.next_step.startswith("ft serve") else smaller  # of flags, serve's own
    if room.bound == ADDRESS_LIMIT:
        mend = UNLIMITED
    return Finding("model.memory", "memory", found.reason, "bad", "it cannot be served", mend, data)


def vram(model: Model, room: Room, found: Fit) -> Finding:
    data: dict[str, Any] = {"used": found.vram, "free": room.vram, "slots": found.slots, "experts": model.sizes.total}
    data["parts"] = found.plan.parts(model.demand) if found.plan is not None else None
    if found.device == "cpu":
        cost = "the CPU computes everything"
        mend = "free some of the GPU's memory, or a form with smaller dense weights (FP8, NVFP4)"
        value = found.notes[0] if found.notes else "too small"
        return Finding("model.vram", "GPU's memory", value, "warn", cost, mend, data)
    share = found.slots / model.sizes.total if model.sizes.total else 1.0
    value = f"{gib(found.vram)} of {gib(room.vram)}: the dense part, and {found.slots} of {model.sizes.total} experts"
    return Finding("model.vram", "GPU's memory", f"{value} ({share:.0%})", data=data)


def pinned(room: Room, found: Fit) -> Finding:
    data = {"bytes": found.pinned, "limit": room.pin}
    value = f"{gib(found.pinned)} of experts"
    if room.pin is None or found.pinned <= room.pin:
        return Finding("model.pinned", "pinned memory", value, data=data)
    cost = "nothing crosses the link: the CPU computes all experts without a slot"
    mend = "memory= in %UserProfile%\\.wslconfig, then wsl --shutdown"
    value = f"{value}, at most {gib(room.pin)} can be pinned"
    return Finding("model.pinned", "pinned memory", value, "warn", cost, mend, data)


def strategy(model: Model, found: Fit, aside: str = "") -> Finding:
    choice = found.strategy
    if choice is None:
        data: dict[str, Any] = {"strategy": None, "device": "cpu"}
        return Finding("model.strategy", "served", "on the CPU", data=data)
    rough = found.lanes is not None and found.lanes.rough and choice.predicted
    reason = choice.reason + ("; by bandwidths, the lanes were not measured with its experts" if rough else "")
    if aside and found.plan is not None and not found.plan.resident:
        reason += f"; what profile.json holds {aside}"
    data = {
        "strategy": choice.strategy,
        "device": "cuda",
        "reason": reason,
        "missing_us": choice.predicted,
        "hit_rate": hits(found, model),
    }
    return Finding("model.strategy", "served", f"{choice.strategy}: {reason}", data=data)


def context(model: Model, found: Fit) -> Finding:
    most = model.demand.max_context
    data = {"context": found.context, "max_context": most}
    return Finding("model.context", "context", f"{found.context} tokens, the model's limit is {most}", data=data)
