"""Which port is free, and who holds one that is not."""

from __future__ import annotations

import errno
import socket


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


def holder(port: int) -> str:
    """Who listens on `port`, as well as this user may know."""
    from ftlaunch.servers.registry import running

    for record in running():
        if record.port == port:
            return f"ft's server of {record.served_name} (pid {record.pid})"
    from ftengine.api.listen import port_holder

    return port_holder(port)
