"""What the model wrote, handed to the dialect when an answer is over, and kept over a restart.

A client sends an answer back in its own words; the dialect renders it from the tokens that were generated. It is told
of them in the threads that render, and the next prompt is rendered only when it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from ftengine.api.answer import Answer
from ftengine.config import EngineConfig
from ftengine.conversation import Conversation
from ftengine.private import private_folder

if TYPE_CHECKING:
    from ftengine.dialect.base import Dialect, Prompt

log = logging.getLogger("ftengine.api")


def answers_path(config: EngineConfig) -> Path | None:
    """The file of this model's answers in the prompt cache's folder; None where nothing may be kept on disk."""
    if config.cache_dir is None or config.cache_disk == 0:
        return None
    model = blake2b(str(Path(config.model_dir).resolve()).encode("utf-8", "surrogateescape"), digest_size=8)
    return Path(config.cache_dir) / f"answers-{model.hexdigest()}"


class Answers:
    """The event loop's side of `Dialect.remember`, `load_answers` and `save_answers`."""

    def __init__(self, threads: ThreadPoolExecutor, path: Path | None) -> None:
        self._threads = threads
        self._path = path
        self._dialect: Dialect | None = None
        self._telling: set[asyncio.Future[None]] = set()
        self.unsaved = False

    def load(self, dialect: Dialect) -> None:
        """Before the first prompt; in any thread."""
        self._dialect = dialect
        if self._path is not None:
            dialect.load_answers(self._path)

    def keep(self, source: Conversation, prompt: Prompt, answer: Answer) -> None:
        """Does not wait. What was cut at a stop string is left out: the client has less than the model wrote."""
        cut = answer.finished is not None and answer.finished.reason == "stop_string"
        if self._dialect is None or not answer.tokens or cut:
            return
        self._start(partial(self._dialect.remember, source, prompt, answer.tokens, answer.events))
        self.unsaved = True

    async def settled(self) -> None:
        """Until the dialect knows all that `keep` was given."""
        if self._telling:
            await asyncio.wait(set(self._telling))

    async def save(self) -> None:
        """Nothing when nothing is new."""
        if not self.unsaved or self._path is None or self._dialect is None:
            return
        self.unsaved = False
        try:
            await self.settled()
            self._start(partial(_write, self._dialect, self._path))
            await self.settled()
        except asyncio.CancelledError:  # by the server's end, which saves once more
            self.unsaved = True
            raise

    def _start(self, work: Callable[[], None]) -> None:
        try:
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:  # the server has ended
            return
        self._telling.add(working)
        working.add_done_callback(self._done)

    def _done(self, working: asyncio.Future[None]) -> None:
        self._telling.discard(working)
        if not working.cancelled() and (error := working.exception()) is not None:
            log.error("an answer could not be kept", exc_info=error)


def _write(dialect: Dialect, path: Path) -> None:
    try:
        private_folder(path.parent)
    except OSError as error:
        log.warning("the answers of this session are not kept: %s: %s", path.parent, error.strerror)
        return
    dialect.save_answers(path)
