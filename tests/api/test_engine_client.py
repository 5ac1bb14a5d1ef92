"""The front's side of the engine with a real process, the scripted engine: restarts, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ftengine import wire
from ftengine.api.engine_client import MAX_BACKLOG, EngineClient, EngineState, EngineStream, RestartPolicy
from ftengine.config import EngineConfig
from ftengine.core import Request, SamplingParams
from ftengine.errors import EngineDied, EngineRefused

ENGINE = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))


@contextlib.asynccontextmanager
async def running(folder: Path, policy: RestartPolicy) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(model_dir=str(folder)), ENGINE, policy)
    task = asyncio.ensure_future(client.run())
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()
        await task


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come to pass"
        await asyncio.sleep(0.01)


async def kill(client: EngineClient) -> None:
    """Returns when the next process is ready."""
    before = client.restarts
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.restarts > before or client.state is EngineState.FAILED)
    await client.wait_ready()


def pauses(caplog: pytest.LogCaptureFixture) -> list[float]:
    return [record.args[0] for record in caplog.records if "started again in" in record.msg]


def test_pauses_grow_while_deaths_come_close_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with running(tmp_path, RestartPolicy(0.01, 0.03, deaths=9, window=1000.0)) as client:
            for _ in range(4):
                await kill(client)

    asyncio.run(run())
    assert pauses(caplog) == [0.01, 0.02, 0.03, 0.03]


def test_deaths_that_lie_far_apart_are_each_like_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More of them than are given up on within `window`, each of an engine that was ready for longer than that."""

    async def run() -> None:
        async with running(tmp_path, RestartPolicy(0.01, 10.0, deaths=2, window=0.3)) as client:
            for _ in range(4):
                await asyncio.sleep(0.4)
                await kill(client)
            assert client.state is EngineState.READY

    asyncio.run(run())
    assert pauses(caplog) == [0.01] * 4


def test_an_engine_that_says_why_it_cannot_start_is_tried_for_ever(tmp_path: Path) -> None:
    """More often than deaths are borne; who asks meanwhile is refused, and who asks afterwards is answered."""

    async def run() -> None:
        async with running(tmp_path, RestartPolicy(0.01, 0.01, deaths=2)) as client:
            (tmp_path / "engine.json").write_text('{"fatal": "the model is gone"}')
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.restarts > 3)
            assert client.state is EngineState.RESTARTING
            with pytest.raises(EngineDied, match="cannot be started again: the model is gone"):
                await client.wait_ready()
            (tmp_path / "engine.json").unlink()
            await until(lambda: client.state is EngineState.READY)
            assert client.trouble is None
            assert await client.wait_ready() is client.ready

    asyncio.run(run())


def test_an_engine_that_dies_whenever_it_loads_is_given_up_on(tmp_path: Path) -> None:
    """However long each load takes: no two deaths lie within `window` here."""

    async def run() -> None:
        async with running(tmp_path, RestartPolicy(0.01, 0.01, deaths=3, window=0.0)) as client:
            (tmp_path / "engine.json").write_text('{"die_loading": 3}')
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.state is EngineState.FAILED)
            assert "ended 3 times while it was loading again" in str(client.failure)

    asyncio.run(run())


def output(tokens: int) -> wire.Output:
    return wire.Output("r", [65] * tokens, 0)


async def read(stream: EngineStream) -> tuple[int, str]:
    """How many tokens there are up to the refusal, and what that says."""
    found = 0
    while True:
        try:
            found += len((await stream.next()).tokens)
        except EngineRefused as error:
            return found, str(error)


def test_who_reads_nothing_is_left(tmp_path: Path) -> None:
    """The engine hears of it, and what waits for the client is bounded."""
    endless = {"say": "z" * 1000, "repeat": 2000, "size": 5000, "delay": 0.02}

    def cancelled() -> bool:
        return '"cancel"' in (tmp_path / "engine.log").read_text()

    async def run() -> tuple[int, str]:
        async with running(tmp_path, RestartPolicy()) as client:
            prompt = list(json.dumps(endless).encode())
            stream = await client.submit(Request("r", prompt, SamplingParams(2_000_000)))
            await until(cancelled)
            assert client.running == 0
            return await read(stream)

    tokens, reason = asyncio.run(run())
    assert MAX_BACKLOG - 5000 < tokens <= MAX_BACKLOG
    assert "tokens behind" in reason


def test_who_reads_gets_any_number_of_tokens(tmp_path: Path) -> None:
    async def run() -> None:
        stream = EngineStream(EngineClient(EngineConfig(model_dir=str(tmp_path)), ENGINE), "r")
        for _ in range(100):
            stream.put(output(MAX_BACKLOG // 2))
            assert len((await stream.next()).tokens) == MAX_BACKLOG // 2
        assert not stream.finished
        for _ in range(3):
            stream.put(output(MAX_BACKLOG // 2))
        assert (await read(stream))[0] == 2 * (MAX_BACKLOG // 2)

    asyncio.run(run())
