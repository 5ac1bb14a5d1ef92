"""Which port is free, and which process listens on one that is not."""

from __future__ import annotations

import errno
import socket
from pathlib import Path


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Raises OSError for an address that is not this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: old connections do not count
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def listens(pid: int, port: int) -> bool:
    """Whether that process, of this user, listens on that port."""
    import psutil

    if pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        connections = getattr(process, "net_connections", None) or process.connections  # the older name
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections("tcp"))
    except (psutil.Error, OSError):
        return False


def is_ft(pid: int) -> bool:
    """Whether that process was started as ft: a number that a record or a leftover file names may be anybody's."""
    import psutil

    if pid <= 0:
        return False
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name in ("ft", "ftlaunch", "__main__.py") for word in words[:4])


def serves(pid: int, port: int) -> bool:
    """Whether that process is a server of ft that listens there."""
    return is_ft(pid) and listens(pid, port)


def listener(port: int) -> tuple[int, str] | None:
    """Process id and address of who listens on `port`; None where nobody does or this user may not know."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    for each in connections:
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid is not None:
            return each.pid, each.laddr.ip
    return None
