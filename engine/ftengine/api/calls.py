"""What the log and /v1/stats say of requests: one line an answer, and totals. Never bodies, never keys."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ftengine.api.answer import Usage
from ftengine.core import Request, Reused

log = logging.getLogger("ftengine.api")


FIRST_TOKENS = 32  # that are kept


class FirstToken(NamedTuple):
    """Of an answer that nothing else ran beside: tokens of its prompt, those of them that were not computed, and
    seconds from handing it to the engine to the first token.
    """

    prompt: int
    cached: int
    seconds: float


@dataclass
class Totals:
    """Since the server's start."""

    started: float = field(default_factory=time.time)  # unix time
    running: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by API
    outcomes: Counter[str] = field(default_factory=Counter)  # stop, length, tool_calls, stop_string, cancelled, failed
    refused: Counter[str] = field(default_factory=Counter)  # by HTTP status
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_tokens: deque[FirstToken] = field(default_factory=lambda: deque(maxlen=FIRST_TOKENS))  # oldest first


class Call:
    """One HTTP request to a model. `begin` is called for each of its answers."""

    def __init__(self, api: str, client: str, totals: Totals) -> None:
        self.api = api
        self.client = client
        self.totals = totals
        self.arrived = time.perf_counter()

    def begin(self, request: Request) -> Record:
        return Record(self, request)

    def notes(self, lines: list[str]) -> None:
        """What of the request was accepted but not honoured."""
        for line in lines:
            log.info("%s %s: %s", self.api, self.client, line)


class Record:
    """One answer's times and counts."""

    def __init__(self, call: Call, request: Request) -> None:
        self._call = call
        self._request = request
        self._usage = Usage()
        self._reused: Reused | None = None
        self._first: float | None = None
        self._began = time.perf_counter()
        self._alone = not call.totals.running
        call.totals.running += 1
        call.totals.answers[call.api] += 1
        self._number = sum(call.totals.answers.values())

    def saw(self, usage: Usage, reused: Reused | None) -> None:
        self._usage, self._reused = usage, reused
        if self._first is None and usage.output:
            self._first = time.perf_counter()
            totals = self._call.totals
            if self._alone and sum(totals.answers.values()) == self._number:
                seconds = round(self._first - self._began, 4)
                totals.first_tokens.append(FirstToken(usage.prompt, usage.cached, seconds))

    def end(self, outcome: str) -> None:
        usage, totals = self._usage, self._call.totals
        totals.running -= 1
        totals.outcomes[outcome.partition(":")[0]] += 1
        totals.prompt_tokens += usage.prompt
        totals.cached_tokens += usage.cached
        totals.output_tokens += usage.output
        now = time.perf_counter()
        speed = "-"
        if self._first is not None and usage.output > 1 and now > self._first:
            speed = f"{(usage.output - 1) / (now - self._first):.1f}"
        log.info(
            "%s %s%s: prompt %d (%s), output %d, first token %s, %s tok/s, %s",
            self._call.api,
            self._call.client,
            session_text(self._request),
            usage.prompt,
            reuse_text(usage, self._reused),
            usage.output,
            "-" if self._first is None else f"{self._first - self._call.arrived:.2f} s",
            speed,
            outcome,
        )


def session_text(request: Request) -> str:
    """Which session, where the client gave a key, and whether beside the main conversation."""
    session = f" session {request.session[:8]}" if request.session else ""
    return f"{session} beside" if request.side else session


def reuse_text(usage: Usage, reused: Reused | None) -> str:
    """How much of a prompt was not computed again, from which tier and at which kind of place; and where it is new to
    its session, or, on the disk, to all servers before."""
    if reused is None:
        return f"{usage.cached} cached"
    tier = f" from {reused.tier}" if reused.tier else ""
    place = f" at {reused.kind.value}" if reused.kind is not None else ""
    return f"{usage.cached} reused{tier}{place}, new from {max(reused.changed, usage.cached)}"
