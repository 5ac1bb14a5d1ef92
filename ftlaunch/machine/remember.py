"""Keeping what a server did, for the next prediction of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftengine.errors import FtError
from ftlaunch.machine import served
from ftlaunch.machine.counted import served as counted
from ftlaunch.machine.cpu import processor
from ftlaunch.machine.system import System
from ftlaunch.servers.record import ServerRecord


def remember(record: ServerRecord, stats: Mapping[str, Any] | None) -> served.Entry | None:
    """stats: the answer of /v1/stats. None, and nothing is kept, where they tell of nothing that could be compared."""
    from ftlaunch.store import resolve

    try:
        found = counted(stats or {}, record.id)
        if found is None:
            return None
        path = resolve(record.model)
    except (LookupError, TypeError, ValueError, AttributeError, FtError):
        return None
    did, gpu = found
    name = str(processor(System()).data["name"] or "")
    return served.keep(served.Entry(str(path.absolute()), name, gpu, served=(did,)))
