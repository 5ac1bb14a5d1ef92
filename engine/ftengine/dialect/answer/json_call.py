"""One call in the Hermes form: `{"name": NAME, "arguments": {…}}` to events.

Keys may come in any order. Until the name is known nothing is given out, so that text which turns out to be no call
can still be text. Arguments go out as they come, compacted; what follows damaged ones is skipped up to the closing tag.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ftengine.dialect.answer.events import EventWriter
from ftengine.dialect.answer.tags import CALL, CALL_END, partial_tag
from ftengine.dialect.arguments import parse_arguments, wrap
from ftengine.dialect.json_stream import JsonStream
from ftengine.dialect.tools import Toolbox
from ftengine.dialect.unicode import well_formed

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_TAG = re.compile("|".join(map(re.escape, (CALL, CALL_END))))


class JsonCall:
    """`consume` begins at the opening brace.

    `done`: the end event is written. `failed`: it is no call and nothing was given out.
    `started`: the start event is written, so it is a call whatever comes.
    """

    def __init__(self, toolbox: Toolbox, events: EventWriter) -> None:
        self.done = False
        self.failed = False
        self.started = False
        self._toolbox = toolbox
        self._events = events
        self._stream = JsonStream(self._begin_member)
        self._member = ""
        self._name_pieces: list[str] = []
        self._name = ""
        self._arguments: list[str] | None = None
        self._sent = 0  # pieces of the arguments given out
        self._skipping = False

    def consume(self, text: str, at: int, final: bool) -> int:
        """Position after what was taken; the rest is undecided, or not part of the call when `done`."""
        if self._skipping:
            return self._skip(text, at, final)
        at = self._stream.consume(text, at, final)
        self._read_name()
        if self._stream.done:
            self._end(complete=True)
        elif self._stream.broken or final:
            self._stream.close()
            self._skipping = self.started
            if not self.started:
                self._end(complete=False)
            return self.consume(text, at, final) if self._skipping else at
        else:
            self._give_out()
        return at

    def _begin_member(self, key: str) -> None:
        self._member = key
        self._stream.output = []
        if key == "name" and not self._name_pieces:
            self._name_pieces = self._stream.output
        elif key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = self._stream.output

    def _read_name(self) -> None:
        complete = self._name_pieces and (self._member != "name" or self._stream.between)
        if complete and not self._name:
            name = json.loads("".join(self._name_pieces))
            self._name = name.strip() if isinstance(name, str) else ""
            if not self._name:
                self._stream.broken = True
        known = self._toolbox.find(self._name) is not None
        if self._name and not self.started and (known or self._arguments is not None):
            self._start()

    def _start(self) -> None:
        self.started = True
        self._events.start_call(self._name)

    def _give_out(self) -> None:
        """Arguments that are an object go out as they come."""
        pieces = self._arguments
        if self.started and pieces and pieces[0] == "{":
            self._events.arguments("".join(pieces[self._sent :]))
            self._sent = len(pieces)

    def _end(self, complete: bool) -> None:
        if self._name and complete and not self.started:
            self._start()
        if not self.started:
            self.failed = True
            return
        self._give_out()
        if not self._sent:
            value = json.loads("".join(self._arguments)) if self._arguments else None
            self._events.arguments(_dumps(self._as_object(value)))
        self._events.end_call()
        self.done = True

    def _as_object(self, value: Any) -> dict[str, Any]:
        tool = self._toolbox.find(self._name)
        return parse_arguments(value, tool) if isinstance(value, str) else wrap(value, tool)

    def _skip(self, text: str, at: int, final: bool) -> int:
        tag = _CALL_TAG.search(text, at)
        if tag is None and not final:
            return max(at, len(text) - partial_tag(text, (CALL, CALL_END)))
        self._end(complete=True)
        return tag.start() if tag else len(text)


def _dumps(value: dict[str, Any]) -> str:
    return well_formed(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
