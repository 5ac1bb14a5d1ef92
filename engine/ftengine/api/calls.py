"""What the log and /v1/stats say of requests: one line an answer, and totals. Never bodies, never keys."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from ftengine.api.answer import Usage

log = logging.getLogger("ftengine.api")


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


class Call:
    """One HTTP request to a model. `begin` is called for each of its answers."""

    def __init__(self, api: str, client: str, totals: Totals) -> None:
        self.api = api
        self.client = client
        self.totals = totals
        self.arrived = time.perf_counter()

    def begin(self) -> Record:
        return Record(self)

    def notes(self, lines: list[str]) -> None:
        """What of the request was accepted but not honoured."""
        for line in lines:
            log.info("%s %s: %s", self.api, self.client, line)


class Record:
    """One answer's times and counts."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._usage = Usage()
        self._first: float | None = None
        call.totals.running += 1
        call.totals.answers[call.api] += 1

    def saw(self, usage: Usage) -> None:
        self._usage = usage
        if self._first is None and usage.output:
            self._first = time.perf_counter()

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
            "%s %s: prompt %d (%d cached), output %d, first token %s, %s tok/s, %s",
            self._call.api,
            self._call.client,
            usage.prompt,
            usage.cached,
            usage.output,
            "-" if self._first is None else f"{self._first - self._call.arrived:.2f} s",
            speed,
            outcome,
        )
