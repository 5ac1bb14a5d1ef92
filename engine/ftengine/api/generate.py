"""From what a client wants to a running answer: render, check lengths, submit, stream.

Knows the neutral conversation only; each API translates into a `Job` and out of the chunks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ftengine.api.answer import Answer, Chunk, Finished, PlainParser
from ftengine.api.answers import Answers, answers_path
from ftengine.api.calls import Call
from ftengine.api.engine_client import EngineClient, EngineStream
from ftengine.api.language import Language
from ftengine.api.sampling import SamplingFields, sampling_params
from ftengine.api.sessions import NOBODY, Caller, Sessions, Shape
from ftengine.api.settings import ServeSettings
from ftengine.conversation import Conversation
from ftengine.core import Request
from ftengine.errors import BadRequest, EngineCannotStart, EngineRefused, FtError, PromptTooLong

if TYPE_CHECKING:
    from ftengine.dialect.base import Prompt

log = logging.getLogger("ftengine.api")
T = TypeVar("T")

Source = Conversation | str | list[int]  # chat, a completion's text, a completion's token ids


@dataclass(frozen=True)
class Job:
    """One answer wanted. `choice` numbers the answers to one request."""

    source: Source
    sampling: SamplingFields
    caller: Caller = NOBODY
    max_tokens: int | None = None  # None: as many as there is room for
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    one_call: bool = False
    choice: int = 0


@dataclass(frozen=True)
class _Rendered:
    prompt: Prompt
    session: str
    side: bool


@dataclass(frozen=True)
class Prepared:
    job: Job
    prompt: Prompt
    request: Request


class Generator:
    """Shared by all requests of a server."""

    def __init__(self, settings: ServeSettings, engine: EngineClient) -> None:
        self._settings = settings
        self._engine = engine
        self._language: asyncio.Future[Language] | None = None
        # Two: a long prompt that is being tokenized must not hold up a short one.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="render")
        self._admitted = 0
        self._sessions = Sessions()
        self._answers = Answers(self._threads, answers_path(settings.engine))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def open(self, open_language: Callable[[str], Language]) -> asyncio.Future[Language]:
        """Start opening the model's language in a thread; requests wait for it."""

        def opened() -> Language:
            language = open_language(self._settings.model_dir)
            self._answers.load(language.dialect)
            return language

        self._language = asyncio.get_running_loop().run_in_executor(self._threads, opened)
        return self._language

    @property
    def open_done(self) -> bool:
        return self._language is not None and self._language.done()

    async def save_answers(self) -> None:
        """To the prompt cache's folder what the dialect keeps of answers, if there is anything new."""
        if not self._off("cache_disk"):
            await self._answers.save()

    def _off(self, tier: str) -> bool:
        """Whether the engine has resolved that this part of the prompt cache holds nothing."""
        fact = self._engine.ready.facts.get(tier) if self._engine.ready else None
        return isinstance(fact, dict) and fact.get("value") == 0

    @property
    def idle(self) -> bool:
        return not self._admitted

    def token_text(self, token: int) -> str:
        """One token's own text. For an answer that has begun: by then the language is open."""
        assert self._language is not None
        return self._language.result().dialect.token_text(token)

    async def plain_text(self, prompt: str | list[int]) -> str:
        """A completion's prompt as text. Raises BadRequest for a token id outside the vocabulary."""
        if isinstance(prompt, str):
            return prompt
        dialect = (await self.language()).dialect
        _check_ids(prompt, dialect.vocab_size)
        decoder = dialect.decoder()
        return decoder.feed(prompt) + decoder.finish()

    async def language(self) -> Language:
        """Raises EngineCannotStart when it could not be opened; then the server is about to end."""
        assert self._language is not None
        try:
            return await asyncio.shield(self._language)
        except FtError as error:
            raise EngineCannotStart(str(error), error.next_step) from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def count(self, conversation: Conversation) -> int:
        """Tokens of the rendered prompt. Raises BadRequest."""
        dialect = (await self.language()).dialect
        return len((await self.in_thread(lambda: dialect.render(conversation))).tokens)

    async def prepare(self, jobs: Sequence[Job]) -> list[Prepared]:
        """Render and check. Waits for an engine that is loading. A source that several jobs share is rendered once.

        Raises BadRequest, PromptTooLong, EngineDied, EngineRefused.
        """
        self._check_room()
        ready = await self._engine.wait_ready()
        language = await self.language()
        context = min(ready.context_length, ready.kv_tokens or ready.context_length)
        await self._answers.settled()
        rendered: dict[int, _Rendered] = {}  # by the source's identity
        prepared = []
        for job in jobs:
            if id(job.source) not in rendered:
                prompt, shape = await self.in_thread(partial(_render, job.source, language, context))
                rendered[id(job.source)] = _Rendered(prompt, *self._sessions.place(job.caller, shape))
            prepared.append(self._checked(job, rendered[id(job.source)], context, language))
        return prepared

    def _checked(self, job: Job, rendered: _Rendered, context: int, language: Language) -> Prepared:
        prompt = rendered.prompt
        length = len(prompt.tokens)
        if not length:
            raise BadRequest("prompt: the model's tokenizer makes nothing of it", param="prompt")
        if length >= context:
            raise PromptTooLong(length, context)
        wanted = job.max_tokens or context
        room = min(context - length, self._settings.max_output_tokens or context)
        if job.max_tokens is not None and wanted > room:
            log.info("max_tokens %d is more than there is room for: %d", wanted, room)
        sampling = sampling_params(
            job.sampling,
            language.defaults,
            max_tokens=min(wanted, room),
            vocab_size=language.dialect.vocab_size,
            end_tokens=language.dialect.eos_token_ids,
            logprobs=job.logprobs,
            choice=job.choice,
        )
        request = Request(
            id=secrets.token_hex(12),
            prompt=prompt.tokens,
            sampling=sampling,
            boundaries=prompt.boundaries,
            boundary_tokens=language.dialect.boundary_tokens if isinstance(job.source, Conversation) else (),
            session=rendered.session,
            side=rendered.side,
        )
        return Prepared(job, prompt, request)

    async def stream(self, prepared: Prepared, call: Call) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks, from Started to Finished. Closing it early cancels the request in the engine.

        Raises EngineDied, EngineRefused.
        """
        self._check_room()
        self._admitted += 1
        try:
            async with aclosing(self._run(prepared, call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._admitted -= 1

    def _check_room(self) -> None:
        if self._admitted >= self._settings.limits.requests:
            raise EngineRefused(f"{self._admitted} requests are waiting or running already", overloaded=True)

    async def _run(self, prepared: Prepared, call: Call) -> AsyncGenerator[Chunk, None]:
        answer = self._answer(prepared, await self.language())
        record, outcome = call.begin(prepared.request), "cancelled"
        source: EngineStream | None = None
        try:
            source = await self._engine.submit(prepared.request)
            while answer.finished is None:
                chunks = answer.feed(await source.next())
                record.saw(answer.usage, answer.reused)
                if chunks and isinstance(chunks[-1], Finished):
                    outcome = chunks[-1].reason
                    source.close()  # at a stop string the engine is still at work: it is told before the client
                    self._keep(prepared, answer)  # before the client, too: its next request may follow at once
                for chunk in chunks:
                    yield chunk
        except Exception as error:
            outcome = f"failed: {error}"
            raise
        finally:
            if source is not None:
                source.close()
            if answer.finished is None:
                self._keep(prepared, answer)
            record.end(outcome)

    def _keep(self, prepared: Prepared, answer: Answer) -> None:
        if isinstance(prepared.job.source, Conversation):
            self._answers.keep(prepared.job.source, prepared.prompt, answer)

    def _answer(self, prepared: Prepared, language: Language) -> Answer:
        job, prompt, dialect = prepared.job, prepared.prompt, language.dialect
        chat = isinstance(job.source, Conversation)
        return Answer(
            decoder=dialect.decoder(),
            parser=dialect.parser(job.source, prompt) if isinstance(job.source, Conversation) else PlainParser(),
            prompt_tokens=len(prompt.tokens),
            stops=job.stops,
            one_call=job.one_call,
            in_reasoning=chat and prompt.in_reasoning,
            keeping=not self._off("cache_device"),
        )


def _render(source: Source, language: Language, context: int) -> tuple[Prompt, Shape | None]:
    # Here, because the dialect brings jinja2 and tokenizers, which the front must not wait for at its start.
    from ftengine.api.oversize import check_size
    from ftengine.dialect.base import Prompt

    if isinstance(source, list):
        _check_ids(source, language.dialect.vocab_size)
        return Prompt("", source), None
    check_size(source, language.dialect, context)
    if isinstance(source, str):
        return Prompt(source, language.dialect.encode(source)), None
    choice = source.tool_choice
    if choice.mode == "named" and all(tool.name != choice.name for tool in source.tools):
        raise BadRequest(f"tool_choice: no tool is named {choice.name[:100]!r}", param="tool_choice")
    return language.dialect.render(source), Shape.of(source)


def _check_ids(tokens: list[int], vocab_size: int) -> None:
    if any(token >= vocab_size for token in tokens):
        raise BadRequest(f"prompt: a token id is outside the vocabulary of {vocab_size}", param="prompt")
