"""The servers that run on this machine under this FT_HOME: find, start, join, wait for and stop them."""

from ftlaunch.servers.health import health, wait_ready
from ftlaunch.servers.join import ServerLeaving, join
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import find, publish, running
from ftlaunch.servers.start import start_background
from ftlaunch.servers.stop import stop

__all__ = [
    "ServerLeaving",
    "ServerRecord",
    "find",
    "health",
    "join",
    "publish",
    "running",
    "start_background",
    "stop",
    "wait_ready",
]
