"""Ports for servers that must be told theirs before they run."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that systems hand out to clients and to servers that take any port (Linux from 32768, macOS from 49152),
# so that between a look and the server's start nobody is given one by chance.
FIRST, COUNT = 10_240, 20_480

# Processes that test side by side have pids near each other, so they begin far apart.
_next = itertools.count(os.getpid() * 997)


def free_port() -> int:
    """One that is free on 127.0.0.1, and that no other call of this process has returned lately."""
    for number in itertools.islice(_next, COUNT):
        port = FIRST + number % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
