"""Who holds a GPU's memory."""

from __future__ import annotations

from typing import Any

from ftlaunch.machine.nvml import Gpu, Holder
from ftlaunch.machine.verdict import Finding, gib

MUCH = 0.25  # of the memory


def held(gpu: Gpu, data: dict[str, Any]) -> Finding:
    holders = [{"pid": holder.pid, "bytes": holder.bytes, "name": name(holder.pid)} for holder in gpu.holders or ()]
    data = {**data, "total": gpu.total, "free": gpu.free, "holders": None if gpu.holders is None else holders}
    label = f"memory of GPU {gpu.index}" if gpu.index else "memory"
    value = f"{gib(gpu.free)} of {gib(gpu.total)} free"
    listed = ", ".join(_shown(holder) for holder in (gpu.holders or ())[:4])
    if listed:
        value += f"; held by {listed}"
    if gpu.free >= (1 - MUCH) * gpu.total:
        return Finding("gpu.memory", label, value, data=data)
    cost = f"{gib(gpu.total - gpu.free)} hold no experts"
    mend = "end what holds it (ft ps shows ft's own servers)" if listed else "nvidia-smi shows what holds it"
    return Finding("gpu.memory", label, value, "warn", cost, mend, data)


def name(pid: int) -> str | None:
    """Of a process; of an ft server, that and its model. None where this user may not know."""
    from ftlaunch.servers import running

    server = next((record for record in running() if _is_or_belongs(pid, record.pid)), None)
    if server is not None:
        return f"ft's server of {server.served_name}"
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


def _is_or_belongs(pid: int, server: int) -> bool:
    """The engine is a child of the server."""
    import psutil

    try:
        return pid == server or psutil.Process(pid).ppid() == server
    except psutil.Error:
        return False


def _shown(holder: Holder) -> str:
    size = "" if holder.bytes is None else f", {gib(holder.bytes)}"
    return f"{name(holder.pid) or 'another user'} (pid {holder.pid}{size})"
