"""`run`: the front process from its settings to its end.

The port listens first, so that /health answers at once; the engine process, the tokenizer and the templates are
started after it. A signal ends both processes within two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import FrameType
from typing import Any

import uvicorn

from ftengine import leases
from ftengine.api import log as logs
from ftengine.api.announcement import Announcement
from ftengine.api.app import build_app
from ftengine.api.connection import http_protocol
from ftengine.api.control import counters
from ftengine.api.engine_client import EngineClient
from ftengine.api.engine_process import DEFAULT_COMMAND
from ftengine.api.front import Front
from ftengine.api.language import OpenLanguage, open_language
from ftengine.api.listen import bind
from ftengine.api.settings import ServeSettings
from ftengine.api.tenancy import last_lease_ended
from ftengine.errors import FtError

log = logging.getLogger("ftengine.api")

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SECONDS = 1.0  # of a server's end that saving answers may take
COUNT_SECONDS = 0.3  # of it that the engine may take to tell its counters: it does so between two steps

AtEnd = Callable[[dict[str, Any]], None]


def run(
    settings: ServeSettings,
    *,
    engine_command: Sequence[str] = DEFAULT_COMMAND,
    language: OpenLanguage = open_language,
    at_end: AtEnd | None = None,
    look: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal, the last lease's end or a failed start. Returns the exit code 0.

    at_end: gets what /v1/stats would answer, from just before the engine ends; or, where the engine was amid a long
    step, from when the server was last idle. Not called if the engine never told anything.
    look: called about every second while the port is announced, to keep up what else others find the server by; it may
    raise OSError, which the log tells once.

    Raises ConfigError (bad address, port in use), CheckpointError, or FtError with what the engine said when it
    could not start.
    """
    logs.set_up(settings.log_level)
    listener = bind(settings)
    _raise_descriptor_limit(settings.limits.connections)
    with listener:
        front = Front(settings, EngineClient(settings.engine, engine_command))
        asyncio.run(_Server(front, listener, language, at_end, look).serve(sockets=[listener]))
    if front.failure is not None:
        raise front.failure
    return 0


class _Server(uvicorn.Server):
    """uvicorn's server with our own start, signals and end."""

    def __init__(
        self,
        front: Front,
        listener: socket.socket,
        language: OpenLanguage,
        at_end: AtEnd | None,
        look: Callable[[], None],
    ) -> None:
        limits = front.settings.limits
        super().__init__(
            uvicorn.Config(
                build_app(front),
                http=http_protocol(limits),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=limits.keep_alive_seconds,
                timeout_graceful_shutdown=1,
                limit_concurrency=limits.connections,
            )
        )
        self._front = front
        self._listener = listener
        self._language = language
        self._at_end = at_end
        self._announcement = Announcement(front.settings.announce, listener, look)
        self._counted: dict[str, Any] | None = None  # the last counters that the engine told
        self._tasks: list[asyncio.Future[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        log.info("listening on http://%s:%d, model %s", host, port, self._front.settings.served_name)
        self._announcement.make()
        self._begin(self._watch_engine())
        self._begin(self._watch_language())
        self._begin(self._watch_answers())
        self._begin(self._watch_announcement())
        if self._front.settings.lease_dir is not None:
            self._begin(self._watch_leases(self._front.settings.lease_dir))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Streams get their last event from the engine client's stop, and connections close after it."""
        self._front.stopping = True
        self._announcement.take_back()
        logging.getLogger("uvicorn").setLevel("CRITICAL")  # cancelled requests are no news now
        for task in self._tasks[1:]:
            task.cancel()
        await self._count()
        await asyncio.gather(self._front.engine.stop(), super().shutdown(sockets))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._front.generator.save_answers(), SAVE_SECONDS)
        self._front.generator.close()
        if self._at_end is not None and self._counted is not None:
            try:
                await asyncio.to_thread(self._at_end, self._counted)
            except Exception:  # nothing that is served depends on it
                log.exception("what was counted could not be handed on")
        log.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Unlike uvicorn's, does not raise the signal again at the end: `run` returns."""
        # A process started with SIGHUP ignored (nohup) outlives its terminal on purpose.
        mine = [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in mine}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("%s: ending", signal.Signals(sig).name)
        super().handle_exit(sig, frame)

    def _begin(self, work: Awaitable[None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _watch_engine(self) -> None:
        engine = self._front.engine
        await engine.run()
        if engine.failure is not None and engine.ready is None:
            await self._cannot_start(engine.failure)

    async def _watch_language(self) -> None:
        try:
            await self._front.generator.open(self._language)
            gc.freeze()  # a vocabulary lives on: to look through it held up a stream for 17 ms
        except FtError as error:
            await self._cannot_start(error)
        except Exception as error:
            log.exception("the tokenizer or the chat template cannot be opened")
            await self._cannot_start(FtError(f"the tokenizer or the chat template cannot be opened: {error}"))

    async def _watch_answers(self) -> None:
        generator = self._front.generator
        while True:
            await asyncio.sleep(self._front.settings.save_seconds)
            if generator.idle:
                await generator.save_answers()
                await self._count()

    async def _watch_announcement(self) -> None:
        while True:
            await asyncio.sleep(self._front.settings.look_seconds)
            self._announcement.look()

    async def _count(self) -> None:
        if self._at_end is not None:
            found = await counters(self._front, seconds=COUNT_SECONDS)
            self._counted = found if found["engine"] is not None else self._counted

    async def _watch_leases(self, folder: str) -> None:
        """A newcomer takes its lease first and looks for the announcement afterwards; here it is the other way round,
        so one of the two sees the other and nobody joins a server that leaves."""
        while not self.should_exit:
            await last_lease_ended(folder, self._front.settings.lease_grace)
            self._announcement.take_back()
            if not leases.held(folder):
                log.info("no lease is held any more: ending")
                self.should_exit = True
            else:
                self._announcement.make()

    async def _cannot_start(self, error: FtError) -> None:
        self._front.failure = self._front.failure or error
        await asyncio.sleep(self._front.settings.failure_seconds)
        self.should_exit = True


def _raise_descriptor_limit(wanted: int) -> None:
    """Half-open connections must not use up the few descriptors that a login shell allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted + 256 if hard == resource.RLIM_INFINITY else min(wanted + 256, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
