"""The servers that run on this machine under this FT_HOME: find, start, join, wait for and stop them."""

from ftlaunch.servers.health import health, wait_ready
from ftlaunch.servers.join import ServerLeaving, join
from ftlaunch.servers.lost import at_port, lost
from ftlaunch.servers.publish import publish
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import find, running
from ftlaunch.servers.start import start_background
from ftlaunch.servers.stop import stop

__all__ = [
    "ServerLeaving",
    "ServerRecord",
    "at_port",
    "find",
    "health",
    "join",
    "lost",
    "publish",
    "running",
    "start_background",
    "stop",
    "wait_ready",
]
