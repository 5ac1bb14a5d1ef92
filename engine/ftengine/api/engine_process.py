"""One life of the engine process: start it, exchange frames with it, end it.

Knows nothing of requests or of what comes after its death; `engine_client` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import ftengine
from ftengine import wire
from ftengine.config import EngineConfig

DEFAULT_COMMAND = (sys.executable, "-m", "ftengine.process")
ASKED_SECONDS = 0.6  # to end after Shutdown, before SIGTERM
SAVING_SECONDS = 2.4  # besides, once it was ready: prompts may have to be written to the disk (process.py)
TERM_SECONDS = 0.3  # to end after SIGTERM, before SIGKILL


class EngineProcess:
    """Made by `start`; over when `receive` returns None."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._patience = ASKED_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    async def start(config: EngineConfig, command: Sequence[str] = DEFAULT_COMMAND) -> EngineProcess:
        """Raises OSError when the program cannot be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    "--config",
                    config.to_json(),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    cwd=_safe_folder(),
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                    start_new_session=True,  # a terminal's Ctrl-C reaches the front alone, which then ends the engine
                )
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return EngineProcess(process, reader, writer)

    async def send(self, message: wire.ToEngine) -> None:
        """Raises ConnectionError when the engine is gone."""
        self._writer.write(wire.encode(message))
        await self._writer.drain()

    def send_soon(self, message: wire.ToEngine) -> None:
        """For small messages: no waiting, and no matter when the engine is gone."""
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    async def receive(self) -> wire.ToFront | None:
        """The next message; None when the connection ended or what came is not a message."""
        try:
            (length,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
            if length > wire.MAX_FRAME:
                return None
            message = wire.decode_to_front(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            return None
        if isinstance(message, wire.Ready):
            self._patience = ASKED_SECONDS + SAVING_SECONDS
        return message

    async def end(self) -> int:
        """Ask, then terminate, then kill. Returns the exit code; when it returns the process is gone."""
        self.send_soon(wire.Shutdown())
        if not await self._exited(self._patience):
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            if not await self._exited(TERM_SECONDS):
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        code = await self._process.wait()
        self._writer.close()
        return code

    async def _exited(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self._process.wait())), seconds)
        except asyncio.TimeoutError:
            return False
        return True


def _safe_folder() -> str | None:
    """Where `python -m` finds nothing but this package: a user's folder may hold a file named like a library's.

    PYTHONSAFEPATH does the same from Python 3.11 on, and keeps the user's folder.
    """
    if sys.version_info >= (3, 11):
        return None
    return str(Path(ftengine.__file__).parents[1])
