"""The whole of `ft serve` in one process: the real front, its routes called without a socket, and the real engine
process's code in a thread. A client's requests go in as JSON, events come out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from ftengine import process, wire
from ftengine.api import engine_client
from ftengine.api.app import build_app
from ftengine.api.engine_client import EngineClient
from ftengine.api.engine_process import EngineProcess
from ftengine.api.front import Front
from ftengine.api.language import open_language
from ftengine.api.settings import ServeSettings
from ftengine.config import EngineConfig
from ftengine.scheduler.channel import Channel, FrontGone
from ftengine.scheduler.fatal import describe
from ftengine.scheduler.loop import serve
from ftengine.scheduler.start import start

MODEL = "local-model"  # as the recorded clients call it
END_SECONDS = 60.0


class EngineThread(EngineProcess):
    """In the place of the process: the same frames over the same kind of socket, the same code behind it."""

    def __init__(self, thread: threading.Thread, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._thread = thread
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        return 0

    @staticmethod
    async def start(config: EngineConfig, command: Sequence[str] = ()) -> EngineProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        thread = threading.Thread(target=_run, args=(config, theirs), name="engine", daemon=True)
        thread.start()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return EngineThread(thread, reader, writer)

    async def end(self) -> int:
        self.send_soon(wire.Shutdown())
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, END_SECONDS)
        assert not self._thread.is_alive(), "the engine does not end"
        self._writer.close()
        return 0


def _run(config: EngineConfig, connection: socket.socket) -> None:
    """What `ftengine.process.run` does, but for the ways in which a process ends."""
    with connection:
        channel = Channel(connection)
        channel.start()
        try:
            engine, ready = start(config, lambda stage, done: None, channel.wake)
            channel.send([ready])
            serve(engine, channel, config.log_seconds)
            engine.close(process.SAVE_SECONDS)
        except FrontGone:
            pass
        except Exception as error:
            channel.send([describe(error)])
            raise
        finally:
            gc.unfreeze()  # `serve` takes it that its process is the engine's alone
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # as the end of a process would, though a thread reads from it


class House:
    """client: of a server that is ready."""

    def __init__(self, front: Front, client: httpx.AsyncClient) -> None:
        self.front = front
        self.client = client

    async def stats(self) -> dict[str, Any]:
        return (await self.client.get("/v1/stats")).json()


@contextlib.asynccontextmanager
async def house(config: EngineConfig, max_output_tokens: int | None = None) -> AsyncIterator[House]:
    """Ends as `ft serve` does when it is asked to: what is worth it goes to disk."""
    settings = ServeSettings(
        model_dir=config.model_dir, served_name=MODEL, engine=config, max_output_tokens=max_output_tokens
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "EngineProcess", EngineThread)
        front = Front(settings, EngineClient(config))
        running = asyncio.ensure_future(front.engine.run())
        try:
            await front.generator.open(open_language)
            ready = await front.engine.wait_ready()
            assert ready.device == "cpu"
            transport = httpx.ASGITransport(build_app(front))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300) as client:
                yield House(front, client)
                await front.generator.save_answers()
        finally:
            await front.engine.stop()
            await running
            front.generator.close()
