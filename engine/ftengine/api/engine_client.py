"""The front's side of the engine: keeps one engine process alive and carries requests to it.

The process is started again when it dies, with growing pauses, until it is plain that it cannot live. Knows nothing
of HTTP or text: token ids go out and come back.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from ftengine import wire
from ftengine.api.engine_process import DEFAULT_COMMAND, EngineProcess
from ftengine.config import EngineConfig
from ftengine.core import Request
from ftengine.errors import EngineCannotStart, EngineDied, EngineRefused, FtError, for_model

log = logging.getLogger("ftengine.engine")

MAX_BACKLOG = 65_536  # tokens waiting for a client that reads slower than the engine writes


class EngineState(str, enum.Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # for good
    STOPPED = "stopped"


class RestartPolicy(msgspec.Struct, frozen=True):
    """Pauses in seconds double from `first_pause` to `longest_pause`; after an engine that was ready for longer than
    `window` they begin anew.

    `deaths` within `window` seconds are given up on, as many in a row while it loads again, and `deaths_loading` of an
    engine that was never ready. One that was ready before and now says why it cannot start is tried for ever: what it
    lacks may come back.
    """

    first_pause: float = 0.25
    longest_pause: float = 10.0
    deaths: int = 5
    deaths_loading: int = 2
    window: float = 300.0


class EngineStream:
    """The outputs of one request. `close` must be called; before the end it cancels the request."""

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._id = request_id
        self._queue: asyncio.Queue[wire.Output | FtError] = asyncio.Queue()
        self._backlog = 0
        self.finished = False

    async def next(self) -> wire.Output:
        """Raises EngineDied or EngineRefused."""
        item = await self._queue.get()
        if isinstance(item, FtError):
            raise item
        self._backlog -= len(item.tokens)
        return item

    def put(self, item: wire.Output | FtError) -> None:
        if self.finished:
            return
        if isinstance(item, FtError):
            self.finished = True
        else:
            self._backlog += len(item.tokens)
            self.finished = item.finish is not None
            if self._backlog > MAX_BACKLOG and not self.finished:
                self.close()
                self.finished = True
                item = EngineRefused(f"the client is {MAX_BACKLOG} tokens behind and was left")
        self._queue.put_nowait(item)

    def close(self) -> None:
        self._client.forget(self._id, cancel=not self.finished)


class EngineClient:
    """Use: `task = create_task(client.run())`, `await client.submit(request)`, `await client.stop()`."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = DEFAULT_COMMAND,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008  frozen
    ) -> None:
        self._config = config
        self._model = config.model_name or config.model_dir  # for people
        self._command = command
        self._policy = policy
        self.state = EngineState.LOADING
        self.stage = "starting the engine"
        self.progress = 0.0  # 0..1, of the current start
        self.ready: wire.Ready | None = None  # the last one; stays known while the engine is started again
        self.failure: FtError | None = None  # why the state is FAILED
        self.trouble: FtError | None = None  # why the last attempt to start the engine again did not succeed
        self.restarts = 0
        self._deaths_loading = 0  # in a row, without a word of its own
        self._ready_at: float | None = None  # when the process that was started last became ready
        self._process: EngineProcess | None = None
        self._streams: dict[str, EngineStream] = {}
        self._asked: list[asyncio.Future[dict[str, Any]]] = []  # stats wanted, in the order of their questions
        self._traces = 0  # recordings asked for
        self._traced: asyncio.Future[wire.Traced] | None = None  # what the one under way will give
        self._settled = asyncio.Event()  # READY, FAILED or STOPPED, or in trouble
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> int:
        return len(self._streams)

    async def run(self) -> None:
        """Keep an engine alive until `stop`, or until it has failed for good (`failure` says why)."""
        deaths: deque[float] = deque(maxlen=self._policy.deaths)
        pause = self._policy.first_pause
        while not self._stopping.is_set():
            death = await self._live()
            if self._stopping.is_set():
                break
            if self.ready is not None and self._ready_at is None:
                self.trouble = _trouble(death)
            if self.trouble is None or isinstance(death, str):
                deaths.append(time.monotonic())
            if self._ready_at is not None:
                self._deaths_loading = 0
                if deaths[-1] - self._ready_at > self._policy.window:
                    pause = self._policy.first_pause
            elif isinstance(death, str):
                self._deaths_loading += 1
            if failure := self._given_up(death, deaths):
                return self._fail(failure)
            self._change(EngineState.RESTARTING, "starting the engine again", 0.0)
            self.restarts += 1
            log.warning("the engine is started again in %.2g s", pause)
            await self._sleep(pause)
            pause = min(pause * 2, self._policy.longest_pause)
        self._change(EngineState.STOPPED, "stopped", 0.0)
        return None

    async def stop(self) -> None:
        """End every stream and the process. Takes at most about a second."""
        self._stopping.set()
        self._end_streams("the server is stopping")
        self._change(EngineState.STOPPED, "stopped", 0.0)
        if self._process is not None:
            await self._process.end()
        await self._gone.wait()

    async def wait_ready(self) -> wire.Ready:
        """Waits through loading and restarts, until one has not succeeded.

        Raises EngineDied when there is no engine now, or never any more; EngineCannotStart when there never was one.
        """
        await self._settled.wait()
        if self.state is EngineState.STOPPED:
            raise EngineDied("the server is stopping")
        if self.failure is not None:
            kind = EngineCannotStart if self.ready is None else EngineDied
            raise kind(str(self.failure), self.failure.next_step)
        if self.trouble is not None:
            raise EngineDied(str(self.trouble), self.trouble.next_step)
        assert self.ready is not None
        return self.ready

    async def submit(self, request: Request) -> EngineStream:
        """Raises EngineDied."""
        await self.wait_ready()
        process = self._process
        assert process is not None
        stream = self._streams[request.id] = EngineStream(self, request.id)
        try:
            await process.send(wire.Submit(request))
        except ConnectionError:
            stream.put(EngineDied("the engine process ended as the request was handed to it"))
        except BaseException:
            stream.close()
            raise
        return stream

    def forget(self, request_id: str, *, cancel: bool) -> None:
        if self._streams.pop(request_id, None) is not None and cancel and self._process is not None:
            self._process.send_soon(wire.Cancel(request_id))

    async def stats(self, seconds: float = 2.0, *, layers: bool = False) -> dict[str, Any] | None:
        """The engine's own figures, or None when it is not there or does not answer in time.

        layers: with those of each layer of its expert cache.
        """
        if self.state is not EngineState.READY or self._process is None:
            return None
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._process.send_soon(wire.AskStats(layers))
        await asyncio.wait({answer}, timeout=seconds)
        # A late answer still finds its place in `_asked`: answers come in the order of the questions.
        return answer.result() if answer.done() and not answer.cancelled() else None

    async def trace(self, steps: int) -> wire.Traced:
        """Records the routing of the next decode steps; cancelled, it ends in the engine too.

        Raises EngineDied, or EngineRefused while another recording is under way.
        """
        await self.wait_ready()
        if self._traced is not None:
            raise EngineRefused("a recording of routing is under way", overloaded=True)
        process = self._process
        assert process is not None
        self._traces += 1
        number = self._traces
        answer: asyncio.Future[wire.Traced] = asyncio.get_running_loop().create_future()
        self._traced = answer
        try:
            process.send_soon(wire.Trace(number, steps))
            return await answer
        except BaseException:
            process.send_soon(wire.StopTrace(number))
            raise
        finally:
            self._traced = None

    def _given_up(self, death: FtError | str, deaths: deque[float]) -> FtError | None:
        """`death`: the engine's own last word, or how the process ended."""
        if isinstance(death, FtError) and self._ready_at is None:
            return death if self.ready is None else None
        most, loading = self._policy.deaths_loading, "loading"
        if self.ready is not None:
            most, loading = self._policy.deaths, "loading again"
        if self._deaths_loading >= most:  # however long each load takes
            return FtError(f"the engine ended {self._deaths_loading} times while it was {loading}: {death}")
        if len(deaths) == self._policy.deaths and deaths[-1] - deaths[0] < self._policy.window:
            return FtError(f"the engine ended {len(deaths)} times in a row and is not started again: {death}")
        return None

    async def _live(self) -> FtError | str:
        """One process from its start to its end. Returns the engine's last word, else how the process ended."""
        self._ready_at = None
        try:
            self._process = await EngineProcess.start(self._config, self._command)
        except OSError as error:
            return FtError(f"the engine process cannot be started: {error}")
        self._gone.clear()
        log.info("the engine process is %d", self._process.pid)
        last_word: FtError | None = None
        try:
            while (message := await self._process.receive()) is not None:
                if isinstance(message, wire.Fatal):
                    last_word = FtError(message.message, for_model(message.next_step, self._model))
                    if self.ready is not None:  # else it is the reason why the server ends, and said then
                        log.error("the engine: %s", message.message)
                        # Whoever asks from now on waits for the next process.
                        self._change(EngineState.RESTARTING, "ending the engine", 0.0)
                else:
                    self._take(message)
        finally:
            if self.trouble is None:
                self._settled.clear()
            code = await self._process.end()
            self._process = None
            self._gone.set()
        if not self._stopping.is_set():
            log.error("the engine process ended (%s)", _exit_text(code))
            self._end_streams(f"the engine process ended ({_exit_text(code)}) while this request ran")
        return last_word or _exit_text(code)

    def _take(self, message: wire.ToFront) -> None:
        if isinstance(message, wire.Output):
            if stream := self._streams.get(message.id):
                stream.put(message)
        elif isinstance(message, wire.Failed):
            if stream := self._streams.get(message.id):
                stream.put(EngineRefused(message.message, overloaded=message.overloaded))
        elif isinstance(message, wire.Loading):
            self.stage, self.progress = message.stage, min(max(message.done, 0.0), 1.0)
        elif isinstance(message, wire.Stats):
            if self._asked and not (answer := self._asked.pop(0)).done():
                answer.set_result(message.values)
        elif isinstance(message, wire.Traced):
            if self._traced is not None and message.id == self._traces and not self._traced.done():
                self._traced.set_result(message)
        elif isinstance(message, wire.Ready):
            self.ready, self._ready_at, self.trouble = message, time.monotonic(), None
            self._change(EngineState.READY, "ready", 1.0)
            log.info(
                "ready: %s, context %d tokens, %d sequences, %s on %s",
                message.architecture,
                message.context_length,
                message.max_running,
                message.dtype,
                message.device,
            )

    def _change(self, state: EngineState, stage: str, progress: float) -> None:
        self.state, self.stage, self.progress = state, stage, progress
        settled = state in (EngineState.READY, EngineState.FAILED, EngineState.STOPPED)
        if settled or self.trouble is not None:
            self._settled.set()
        else:
            self._settled.clear()

    def _fail(self, failure: FtError) -> None:
        log.error("%s", failure)
        self.failure = failure
        self._change(EngineState.FAILED, "failed", 0.0)
        self._end_streams(str(failure))

    def _end_streams(self, sentence: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDied(sentence))
        asked, self._asked = self._asked, []
        for answer in asked:
            answer.cancel()
        if self._traced is not None and not self._traced.done():
            self._traced.set_exception(EngineDied(sentence))

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except asyncio.TimeoutError:
            pass


def _trouble(death: FtError | str) -> FtError:
    """Of an engine that was to be started again."""
    if isinstance(death, FtError):
        step = death.next_step or "mend that: the engine is tried again by itself"
        return FtError(f"the engine cannot be started again: {death}", step)
    return FtError(f"the engine ended while it was started again: {death}", "wait: it is tried again by itself")


def _exit_text(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by signal 9, as Linux does when memory runs out"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
