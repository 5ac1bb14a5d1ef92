"""The listening socket: which addresses are allowed, and who holds a port that is taken."""

from __future__ import annotations

import errno
import socket
from typing import Any

from ftengine.api.guard import is_loopback
from ftengine.api.settings import ServeSettings
from ftengine.errors import ConfigError


def bind(settings: ServeSettings) -> socket.socket:
    """It listens. Raises ConfigError: a blank key, not loopback and no key, no such address or port, port in use."""
    host, port = settings.host, settings.port
    if settings.api_key is not None and not settings.api_key.strip():
        raise ConfigError("the API key is blank, which no client can send", "ft serve --api-key KEY, or leave it out")
    if not is_loopback(host) and not settings.api_key:
        raise ConfigError(
            f"{host or 'every address'} can be reached from other machines, so an API key is needed",
            "ft serve --host HOST --api-key KEY",
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not a port; it must be at most 65535", "ft serve --port 1919")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} is not an address of this machine ({error})") from error
    try:
        try:
            return _listener(family, kind, protocol, address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not settings.other_port:
                raise
            return _listener(family, kind, protocol, (address[0], 0, *address[2:]))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use by {port_holder(port)}", f"ft serve --port {port + 1}, or ft stop"
            ) from None
        raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror})") from error


def _listener(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    """Raises OSError; EADDRINUSE may come from `listen` only, when another one bound the port in the same moment."""
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def port_holder(port: int) -> str:
    """Words for the process that listens on `port`: its name and id, as far as this user may know them."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return "another process"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process"
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return "another process"
