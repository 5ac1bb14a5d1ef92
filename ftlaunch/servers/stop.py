"""Stopping a server and its engine."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from ftengine.errors import FtError
from ftlaunch.servers.ports import is_ft, listens
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import is_alive

if TYPE_CHECKING:
    import psutil


def stop(record: ServerRecord, patience: float = 5.0) -> bool:
    """End the server: politely, after `patience` seconds by force. False when it had ended before.

    Raises PermissionError when it belongs to another user, FtError when the process that the record names is another
    one: the record is damaged, or it comes from another container.
    """
    if not is_alive(record):
        return False
    if not (listens(record.pid, record.port) or is_ft(record.pid)):  # one that is ending listens no more
        raise FtError(
            f"process {record.pid} is not the server of {record.served_name}: its record is damaged, or it runs in "
            "another container",
            "ft ps, or stop it where it was started",
        )
    front, family = _process(record.pid), _descendants(record.pid)
    _signal(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while _runs(front) and time.monotonic() < deadline:
        time.sleep(0.02)
    if _runs(front):
        _signal(record.pid, signal.SIGKILL)
    _end(family)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _process(pid: int) -> psutil.Process | None:
    import psutil

    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _runs(process: psutil.Process | None) -> bool:
    """The process itself is asked: a record that somebody has damaged tells nothing of its end."""
    import psutil

    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _descendants(pid: int) -> list[psutil.Process]:
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _end(family: list[psutil.Process]) -> None:
    """An engine whose front is gone ends by itself; one that hangs is killed."""
    import psutil

    _, left = psutil.wait_procs(family, timeout=2.0)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
