"""Using a server that others may be about to leave."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

from ftengine.errors import FtError
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import is_alive, port_path


class ServerLeaving(FtError):
    """The server's last user has just left and it is ending: find or start another one."""


def join(record: ServerRecord) -> AbstractContextManager[object]:
    """Hold a lease on the server for the `with` block; nothing to hold when it lives until it is stopped.

    The lease is taken first and the server looked at afterwards, as a leaving server first takes its announcement
    away and looks for leases afterwards: one of the two sees the other. Raises ServerLeaving.
    """
    if record.lease_dir is None:
        return nullcontext()
    from ftengine.leases import acquire

    with suppress(FileNotFoundError):  # an ended server's folder, removed by another start at this moment
        lease = acquire(record.lease_dir)
        if port_path(record.id).exists() and is_alive(record):
            return lease
        lease.release()
    raise ServerLeaving(f"the server of {record.served_name} is ending", "run it again")
