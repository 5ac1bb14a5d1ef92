"""Memory's findings, against trees of files as proc(5), cgroups(7) and the kernel's psi.rst describe them."""

from __future__ import annotations

import pytest

from ftengine.memory.machine import ADDRESS_LIMIT
from ftlaunch.machine import limits, memory, model
from ftlaunch.machine.fit import Fit
from ftlaunch.machine.probe import Asked

MEMINFO = """MemTotal:       {total} kB
MemFree:         1000000 kB
MemAvailable:   {available} kB
SwapTotal:      {swap} kB
SwapFree:       {swap_free} kB
HugePages_Total:    1024
HugePages_Free:     {huge}
Hugepagesize:       2048 kB
"""


def meminfo(total: float = 16, available: float = 12, swap: float = 0, swap_free: float = 0, huge: int = 0) -> str:
    """GiB."""
    sizes = {"total": total, "available": available, "swap": swap, "swap_free": swap_free}
    return MEMINFO.format(huge=huge, **{name: int(size * (1 << 20)) for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("available", "verdict"), [(12, "ok"), (8, "ok"), (4, "warn"), (1.5, "warn"), (0.5, "bad"), (0, "bad")]
)
def test_size(tree, available: float, verdict: str) -> None:
    found = memory.size(tree({"proc/meminfo": meminfo(available=available)}))
    assert found.verdict == verdict
    assert found.data["usable"] == int(available * (1 << 20)) << 10
    assert bool(found.mend) == (verdict != "ok")


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/memory.max": "536870912"},
        {"proc/self/cgroup": "4:memory:/box\n", "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "536870912"},
    ],
)
def test_half_a_gigabyte_of_cgroup(tree, files: dict[str, str]) -> None:
    usage = {
        "sys/fs/cgroup/box/memory.current": "1000",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000",
    }
    found = memory.size(tree({"proc/meminfo": meminfo(), **usage, **files}))
    assert found.verdict == "bad"
    assert "the cgroup still allows 512 MiB" in found.value
    assert "docker run --memory" in found.mend
    assert found.data["usable"] == (512 << 20) - 1000


def test_swap(tree) -> None:
    assert memory.swap(tree({"proc/meminfo": meminfo()})).value == "none"
    assert memory.swap(tree({"proc/meminfo": meminfo(swap=8, swap_free=7)})).verdict == "ok"
    found = memory.swap(tree({"proc/meminfo": meminfo(swap=8, swap_free=4)}))
    assert found.verdict == "warn"
    assert found.data == {"total": 8 << 30, "used": 4 << 30}


@pytest.mark.parametrize(
    ("mode", "huge", "verdict"),
    [
        ("always [madvise] never", 0, "ok"),
        ("always madvise [never]", 0, "note"),
        ("[always] madvise never", 700, "warn"),
    ],
)
def test_huge_pages(tree, mode: str, huge: int, verdict: str) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    found = memory.pages(tree({path: mode, "proc/meminfo": meminfo(huge=huge)}))
    assert found.verdict == verdict
    assert found.data["reserved_unused"] == huge << 21


def test_pressure(tree) -> None:
    calm = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    assert memory.pressure(tree({"proc/pressure/memory": calm})).verdict == "ok"
    assert memory.pressure(tree({"proc/pressure/memory": calm.replace("=0.00", "=40.50")})).verdict == "warn"


def test_nothing_is_told(tree) -> None:
    """As on macOS: psutil says how much memory there is."""
    system = tree({})
    assert memory.size(system).data["total"] > 0
    assert memory.pressure(system).data["waiting_percent"] is None
    assert memory.pages(system).verdict == "ok"


def test_wsl_pins_half(tree) -> None:
    kernel = {"proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2\n", "proc/meminfo": meminfo(total=16)}
    found = limits.pinning(tree(kernel))
    assert found.data == {"bytes": 8 << 30, "wsl": True}
    assert ".wslconfig" in found.mend
    assert limits.pinning(tree({"proc/sys/kernel/osrelease": "6.8.0-generic\n"})).data["wsl"] is False


def test_limits_of_the_process(tree, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    def limited(kind: int) -> tuple[int, int]:
        return {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20), resource.RLIMIT_NOFILE: (256, 4096)}.get(
            kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )

    monkeypatch.setattr(resource, "getrlimit", limited)
    assert limits.memlock(False).verdict == "ok"
    assert "limits.conf" in limits.memlock(True).mend
    assert limits.files().verdict == "warn"
    assert limits.addresses(tree({"proc/sys/vm/overcommit_memory": "0\n"})).verdict == "ok"
    assert limits.addresses(tree({"proc/sys/vm/overcommit_memory": "2\n"})).verdict == "note"
    for size, verdict in ((1 << 29, "bad"), (limits.ADDRESSES, "bad"), (1 << 36, "warn")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, size=size: (size, size))
        assert limits.addresses(tree({})).verdict == verdict


def test_a_model_has_what_the_engine_leaves_of_an_address_limit() -> None:
    room = model.room_of(Asked(model="m", known={"limits.addresses": {"bytes": limits.ADDRESSES + (1 << 20)}}))
    assert (room.memory, room.bound) == (1 << 20, ADDRESS_LIMIT)
    found = model.memory(room, Fit("cpu", reason="too large", next_step="ft list"))
    assert (found.verdict, found.mend) == ("bad", limits.UNLIMITED)
