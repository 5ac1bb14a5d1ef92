"""Events of one answer in the making: numbering, ids, and fragments that join to one JSON object."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from itertools import groupby

from ftengine.conversation import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

_ALPHANUMERIC = string.ascii_letters + string.digits


class EventWriter:
    """Collects events; neighbouring fragments of one kind become one event when taken."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._calls = 0
        self._arguments: list[str] = []

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return list(_merged(events))

    def text(self, text: str) -> None:
        if text:
            self._events.append(TextDelta(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def start_call(self, name: str) -> None:
        call_id = "call_" + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(24))
        self._events.append(ToolCallStart(self._calls, call_id, name))
        self._arguments = []

    def arguments(self, fragment: str) -> None:
        if fragment:
            self._arguments.append(fragment)
            self._events.append(ToolCallDelta(self._calls, fragment))

    def end_call(self) -> None:
        self._events.append(ToolCallEnd(self._calls, "".join(self._arguments)))
        self._calls += 1


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    for kind, group in groupby(events, key=type):
        if kind is TextDelta:
            yield TextDelta("".join(event.text for event in group if isinstance(event, TextDelta)))
        elif kind is ReasoningDelta:
            yield ReasoningDelta("".join(event.text for event in group if isinstance(event, ReasoningDelta)))
        elif kind is ToolCallDelta:
            deltas = [event for event in group if isinstance(event, ToolCallDelta)]
            yield ToolCallDelta(deltas[0].index, "".join(delta.fragment for delta in deltas))
        else:
            yield from group
