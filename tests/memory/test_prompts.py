"""What is given to prompts on the device, in host memory and on the disk: sums by hand, refusals by their numbers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftengine.cache.tensors import kv_bytes_per_token, state_bytes
from ftengine.cache.tiers import base
from ftengine.cache.tiers import open as tiers
from ftengine.config import EngineConfig, Resolved
from ftengine.core import CacheLayout, StateSpec
from ftengine.errors import ConfigError
from ftengine.memory import prompts
from ftengine.memory.prompts import (
    Below,
    least_bytes,
    plan_anchors,
    plan_below,
    plan_disk,
    plan_host,
    slot_bytes,
    staging_bytes,
    transit_bytes,
)
from ftengine.memory.sizes import GIB, MIB
from ftlaunch.cli.sizes import size

TOKEN, STATE = 20 * 1024, 61 * MIB  # Qwen3.6-35B-A3B in bfloat16
LEAST = least_bytes(TOKEN, STATE)


def config(**values) -> EngineConfig:
    return EngineConfig("somewhere", **values)


def test_sizes_of_what_is_kept() -> None:
    """As the tiers themselves have them."""
    layout = CacheLayout(10, 2, 256, "bfloat16", ((StateSpec("s", (61, 1 << 18), "float32"),),))
    assert (kv_bytes_per_token(layout), state_bytes(layout)) == (TOKEN, STATE)
    assert prompts.CHUNK_TOKENS == base.CHUNK_TOKENS
    assert transit_bytes(TOKEN, STATE) == tiers.transit_bytes(layout)
    assert staging_bytes(config(), TOKEN) == tiers.staging_bytes(layout)
    assert staging_bytes(config(cache_host=0, cache_disk=0), TOKEN) == 0
    without_state = CacheLayout(10, 2, 256, "bfloat16")
    assert transit_bytes(TOKEN, 0) == tiers.transit_bytes(without_state)
    assert slot_bytes(TOKEN, STATE, 16) == 61 * MIB + 320 * 1024
    assert LEAST == 81 * MIB


def anchors(room: int, state: int = STATE, **values) -> Resolved[int]:
    slot = slot_bytes(TOKEN, state, 16)
    return plan_anchors(config(**values), room, slot, state=state, running=8, share=20, floor=8)


def test_half_a_gigabyte_of_anchors() -> None:
    assert anchors(20 * GIB, cache_device=size("0.5GB")).value == 7
    assert anchors(20 * GIB, cache_device=0) == Resolved(0, "asked for")


@pytest.mark.parametrize("room", [-GIB, 0, MIB, GIB])
def test_little_room_gives_few_anchors_and_no_error(room: int) -> None:
    for state in (STATE, 0):
        assert anchors(room, state).value * slot_bytes(TOKEN, state, 16) <= max(room, 0) // 8


def test_a_model_that_keeps_nothing() -> None:
    nothing = plan_anchors(config(), GIB, 0, state=0, running=8, share=20, floor=8)
    assert nothing.value == 0


def test_host_memory_beside_a_gpu() -> None:
    assert plan_host(config(), 8 * GIB, LEAST, device="cuda") == Resolved(
        2 * GIB, "1/4 of 8.00 GiB of host memory left"
    )
    assert plan_host(config(), 64 * GIB, LEAST, device="cuda") == Resolved(4 * GIB, "default: a long session")
    none = plan_host(config(), 100 * MIB, LEAST, device="cuda")
    assert none == Resolved(0, "1/4 of 0.10 GiB holds nothing: 81.0 MiB are the least")
    assert plan_host(config(), -GIB, LEAST, device="cuda").value == 0
    assert plan_host(config(cache_host=3 * GIB), 4 * GIB, LEAST, device="cuda") == Resolved(3 * GIB, "asked for")


def test_host_memory_on_the_cpu_is_the_first_tier() -> None:
    assert plan_host(config(), 64 * GIB, LEAST, device="cpu").value == 0
    assert plan_host(config(cache_host=GIB), 64 * GIB, LEAST, device="cpu") == Resolved(GIB, "asked for")


@pytest.mark.parametrize(
    ("asked", "room", "says", "advised"),
    [
        (4 * GIB, 3 * GIB, "4.00 GiB of host memory do not fit: 3.00 GiB are left for it", 3 * GIB),
        (4 * GIB, 10 * MIB, "4.00 GiB of host memory do not fit: 0.01 GiB are left", 0),
        (4 * GIB, -GIB, "4.00 GiB of host memory do not fit: 0.00 GiB are left", 0),
        (50 * MIB, GIB, "--cache-host is 50.0 MiB, and an anchor with 1024 tokens .* takes 81.0 MiB", 649 * MIB),
    ],
)
def test_host_memory_that_cannot_be_given(asked: int, room: int, says: str, advised: int) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        plan_host(config(cache_host=asked), room, LEAST, device="cuda")
    command = error.value.next_step.partition(",")[0]
    assert command.startswith("ft serve --cache-host ")
    assert size(command.rpartition(" ")[2]) == advised
    if advised <= room:
        assert plan_host(config(cache_host=advised), room, LEAST, device="cuda").value == advised


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets how much of the disk is free."""

    def set_free(bytes_: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=bytes_))

    return set_free


def test_files_by_default(free, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    free(1000 * 10**9)
    assert plan_disk(config(cache_dir=str(folder)), LEAST, GIB, 100 * MIB) == Resolved(
        20 * 10**9, f"default, in {folder}"
    )
    free(50 * GIB)
    assert plan_disk(config(cache_dir=str(folder)), LEAST, GIB, 100 * MIB) == Resolved(
        5 * GIB, f"1/10 of 50.00 GiB free, in {folder}"
    )
    free(500 * MIB)
    few = plan_disk(config(cache_dir=str(folder)), LEAST, GIB, 100 * MIB)
    assert (few.value, few.reason) == (0, "1/10 of 0.49 GiB free holds nothing: 81.0 MiB are least")
    assert not folder.exists()


def test_no_files(tmp_path: Path) -> None:
    assert plan_disk(config(), LEAST, GIB, 100 * MIB) == Resolved(0, "there is no folder for them")
    assert plan_disk(config(cache_disk=0), LEAST, GIB, 100 * MIB) == Resolved(0, "asked for")
    assert plan_disk(config(cache_disk=0, cache_dir=str(tmp_path)), LEAST, GIB, 100 * MIB) == Resolved(0, "asked for")


def test_files_that_are_there_count_as_room(free, tmp_path: Path) -> None:
    """Links are neither followed nor counted for more than themselves."""
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "record").write_bytes(b"x")
    os.truncate(tmp_path / "key" / "record", 2 * GIB)
    os.symlink("/", tmp_path / "key" / "link")
    free(3 * GIB)
    asked = config(cache_disk=5 * GIB, cache_dir=str(tmp_path))
    assert plan_disk(asked, LEAST, GIB, 100 * MIB) == Resolved(5 * GIB, f"asked for, in {tmp_path}")
    with pytest.raises(ConfigError, match=r"files may take 6.00 GiB, but .* has room for 5.00 GiB") as error:
        plan_disk(config(cache_disk=6 * GIB, cache_dir=str(tmp_path)), LEAST, GIB, 100 * MIB)
    assert error.value.next_step.startswith("ft serve --cache-disk 2560MiB")


def test_too_few_bytes_of_files(free, tmp_path: Path) -> None:
    free(100 * GIB)
    with pytest.raises(ConfigError, match=r"--cache-disk is 1.0 MiB, and an anchor .* it would hold nothing"):
        plan_disk(config(cache_disk=MIB, cache_dir=str(tmp_path)), LEAST, GIB, 100 * MIB)


def test_files_take_host_memory_on_their_way(free, tmp_path: Path) -> None:
    """184 MiB here: where there is no host tier, they are part of the plan."""
    free(50 * GIB)
    values, transit = {"cache_dir": str(tmp_path)}, transit_bytes(TOKEN, STATE)
    made = plan_below(config(**values), TOKEN, STATE, 8 * transit, device="cpu")
    assert (made.host.value, made.disk.value, made.memory) == (0, 5 * GIB, transit)
    less = plan_below(config(**values), TOKEN, STATE, 8 * transit - 1, device="cpu")
    assert (less.disk.value, less.memory) == (0, 0)
    assert less.disk.reason.startswith("files take 182.0 MiB of host memory on their way, over 1/8 of the 1.42 GiB")
    asked = config(cache_disk=GIB, **values)
    assert plan_below(asked, TOKEN, STATE, transit, device="cpu").memory == transit
    with pytest.raises(ConfigError, match=r"take 182.0 MiB of host memory, 182.0 MiB are left") as error:
        plan_below(asked, TOKEN, STATE, transit - 1, device="cpu")
    assert error.value.next_step == "ft serve --cache-disk 0"
    beside = plan_below(config(cache_host=GIB, **values), TOKEN, STATE, GIB, device="cuda")
    assert beside == Below(Resolved(GIB, "asked for"), beside.disk, GIB)
    assert beside.disk.value == 5 * GIB


def test_a_folder_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    found = plan_disk(config(cache_dir=str(tmp_path)), LEAST, GIB, 100 * MIB)
    assert found == Resolved(0, f"{tmp_path}: Permission denied")
