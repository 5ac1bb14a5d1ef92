"""How much of the machine keeps prompts, each part with its reason: anchors where the model computes, copies in host
memory, files. Refuses with numbers. Torch-free.

An anchor is a place that a prompt goes on from. On the device it takes one slot: a sequence's recurrent state, and a
page for the keys and values of its last, partly filled page. Running sequences take slots from the same pool, if they
have a recurrent state.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory.sizes import GIB, MIB, gigabytes, megabytes, typed

CHUNK_TOKENS = 512  # of keys and values that lie together in host memory and in a file (cache/tiers/base.py)

ANCHOR_CAP = 8 * GIB
MOST_ANCHORS = 1024  # one every 512 tokens of four contexts of 131072
LEAST_ANCHORS = 8  # a prefill step leaves several; with fewer it would have to be cut
ENDS = 8  # without recurrent state only the end of a path needs one: of each running sequence's last paths, so many

# A session of 60,000 tokens of Qwen3.6 is 1.2 GiB of keys and values and forty states of 61 MiB: 3.6 GiB.
HOST_SHARE, HOST_CAP = 4, 4 * GIB
# In files, with a state about every 450 tokens, it is 9 GB.
DISK_SHARE, DISK_CAP = 10, 20 * 10**9  # two such sessions, or the beginnings of many
TRANSIT_SHARE = 8  # of the host memory left, for what goes through it only


def slots_running(state: int, running: int) -> int:
    """Slots that so many running sequences take."""
    return running if state else 0


def slot_bytes(token: int, state: int, page_size: int) -> int:
    """token, state: bytes of one token's keys and values, and of one sequence's recurrent state, over all layers."""
    return state + page_size * token


def least_bytes(token: int, state: int) -> int:
    """The smallest tier below the device that can hold anything: one chunk, and one anchor after it."""
    return state + 2 * CHUNK_TOKENS * token


def transit_bytes(token: int, state: int) -> int:
    """Host memory through which a disk tier reads and writes where there is no host tier: two anchors, four chunks."""
    chunk = CHUNK_TOKENS * token
    return max(64 * MIB, 2 * max(chunk, chunk - token + state) + 4 * chunk)


def staging_bytes(config: EngineConfig, token: int) -> int:
    """Memory of a GPU through which keys and values go on their way to and from the tiers below it."""
    return 0 if config.cache_host == config.cache_disk == 0 else CHUNK_TOKENS * token


def plan_anchors(
    config: EngineConfig, room: int, slot: int, *, state: int, running: int, share: int, floor: int
) -> Resolved[int]:
    """How many anchors the device holds.

    room: bytes that anchors and what comes after them can have; slot: bytes of one; running: sequences. By default a
    `share`-th of the room, and up to a `floor`-th where that is less than a step of prefill wants.
    Raises ConfigError for a budget that holds none.
    """
    if not slot:
        return Resolved(0, "the model keeps nothing between steps")
    if config.cache_device is not None:
        _check_useful("cache_device", config.cache_device, slot, "one anchor")
        return Resolved(config.cache_device // slot, "asked for")
    each, room = f"{megabytes(slot)} each", max(room, 0)
    if not state:
        count = min(ENDS * running, room // share // slot)
        return Resolved(count, f"the model has no recurrent state: the ends of {count} prompts, {each}")
    wanted = max(2 * running, LEAST_ANCHORS)
    shared = min(room // share, ANCHOR_CAP) // slot
    least = min(wanted, room // floor // slot)
    if shared >= least:
        return Resolved(min(shared, MOST_ANCHORS), f"1/{share} of {gigabytes(room)}, {each}")
    why = f"{wanted} that prefill wants" if least == wanted else f"1/{floor} of {gigabytes(room)}"
    return Resolved(least, f"{why}, {each}")


@dataclass(frozen=True)
class Below:
    """The tiers below the device, in bytes. memory: host memory that both take together."""

    host: Resolved[int]
    disk: Resolved[int]
    memory: int

    def facts(self, device: Resolved[int]) -> dict[str, Resolved[Any]]:
        """By the names of the settings. device: bytes of the first tier."""
        return {"cache_device": device, "cache_host": self.host, "cache_disk": self.disk}


def plan_below(config: EngineConfig, token: int, state: int, room: int, *, device: str) -> Below:
    """token, state: bytes of a token's keys and values and of a sequence's recurrent state; room: bytes of host memory
    that nothing else needs. Raises ConfigError for budgets that were asked for and cannot be."""
    least = least_bytes(token, state)
    host = plan_host(config, room, least, device=device)
    transit = 0 if host.value else transit_bytes(token, state)
    disk = plan_disk(config, least, room - host.value, transit)
    return Below(host, disk, host.value or (transit if disk.value else 0))


def plan_host(config: EngineConfig, room: int, least: int, *, device: str) -> Resolved[int]:
    """Bytes of host memory for copies of what the device has to give up.

    room: bytes of host memory that it can have; least: see `least_bytes`. Raises ConfigError for what does not fit, or
    is of no use.
    """
    asked, room = config.cache_host, max(room, 0)
    if asked is None:
        if device != "cuda":  # a copy would take the room of what it is a copy of
            return Resolved(0, "on the CPU the first tier lies in host memory already")
        share = min(room // HOST_SHARE, HOST_CAP)
        if share < least:
            return Resolved(0, f"1/{HOST_SHARE} of {gigabytes(room)} holds nothing: {megabytes(least)} are the least")
        if share == HOST_CAP:
            return Resolved(share, "default: a long session")
        return Resolved(share, f"1/{HOST_SHARE} of {gigabytes(room)} of host memory left")
    if asked > room:
        fits = room if room >= least else 0
        raise ConfigError(
            f"the prompt cache's {gigabytes(asked)} of host memory do not fit: {gigabytes(room)} are left for it",
            f"ft serve --cache-host {typed(fits)}",
        )
    _check_useful("cache_host", asked, least, f"an anchor with {2 * CHUNK_TOKENS} tokens of keys and values")
    return Resolved(asked, "asked for")


def plan_disk(config: EngineConfig, least: int, room: int, transit: int) -> Resolved[int]:
    """Bytes of files, those of other models in the same folder included.

    least: see `least_bytes`; room, transit: host memory that there is, and that files need on their way. Raises
    ConfigError for a budget that is of no use, or that the disk does not have.
    """
    asked = config.cache_disk
    if asked == 0 or config.cache_dir is None:
        return Resolved(0, "asked for" if asked == 0 else "there is no folder for them")
    folder = Path(config.cache_dir)
    try:
        most = shutil.disk_usage(_existing(folder)).free + _held(folder)
    except OSError as error:
        return Resolved(0, f"{folder}: {error.strerror}")
    if asked is None:
        if transit > room // TRANSIT_SHARE:
            needed = f"files take {megabytes(transit)} of host memory on their way"
            return Resolved(0, f"{needed}, over 1/{TRANSIT_SHARE} of the {gigabytes(max(room, 0))} left")
        share = min(most // DISK_SHARE, DISK_CAP)
        if share < least:
            return Resolved(0, f"1/{DISK_SHARE} of {gigabytes(most)} free holds nothing: {megabytes(least)} are least")
        why = "default" if share == DISK_CAP else f"1/{DISK_SHARE} of {gigabytes(most)} free"
        return Resolved(share, f"{why}, in {folder}")
    if transit > room:
        raise ConfigError(
            f"on their way to files prompts take {megabytes(transit)} of host memory, "
            f"{megabytes(max(room, 0))} are left",
            "ft serve --cache-disk 0",
        )
    if asked > most:
        raise ConfigError(
            f"the prompt cache's files may take {gigabytes(asked)}, but {folder} has room for {gigabytes(most)}",
            f"ft serve --cache-disk {typed(most // 2)}, or set FT_HOME to a folder on another disk",
        )
    _check_useful("cache_disk", asked, least, f"an anchor with {2 * CHUNK_TOKENS} tokens of keys and values")
    return Resolved(asked, f"asked for, in {folder}")


def _check_useful(name: str, asked: int, least: int, what: str) -> None:
    if 0 < asked < least:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{flag} is {megabytes(asked)}, and {what} takes {megabytes(least)}: it would hold nothing",
            f"ft serve {flag} {typed(8 * least + MIB)}, or {flag} 0",
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    return next(path for path in (folder, *folder.parents) if path.exists() or path == path.parent)


def _held(folder: Path) -> int:
    """Bytes of the files in it; links are not followed."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - many short calls
            except OSError:  # a server removed it meanwhile
                continue
    return total
