"""One call in the XML form: `<parameter=K>` texts to the JSON of an arguments object.

A string parameter is given out as it comes; other types when they are complete, read by the tool's schema.
"""

from __future__ import annotations

import json
import re

from ftengine.dialect.answer.closing import Closed, Nesting, Place, closing
from ftengine.dialect.answer.events import EventWriter
from ftengine.dialect.answer.schema import ParameterTypes
from ftengine.dialect.answer.tags import PARAMETER, XML_TAGS, partial_tag, read_name
from ftengine.dialect.unicode import well_formed

_TAG = re.compile("|".join(map(re.escape, XML_TAGS)))


class XmlCall:
    """`consume` begins at the first `<parameter=`. `done`: the call is over and its end event is written."""

    def __init__(self, name: str, types: ParameterTypes, wrapped: bool, events: EventWriter) -> None:
        self.done = False
        self._types = types
        self._wrapped = wrapped
        self._events = events
        self._given: set[str] = set()
        self._value: _Value | None = None
        events.start_call(name)

    def consume(self, text: str, at: int, final: bool) -> int:
        """Position after what was taken; the rest is undecided, or not part of the call when `done`."""
        while not self.done:
            before = at
            at = self._open_parameter(text, at, final) if self._value is None else self._read(text, at, final)
            if at == before:
                break
        return at

    def finish(self) -> None:
        if self._value is not None:
            self._end_value()
        if not self._given:
            self._events.arguments("{")
        self._events.arguments("}")
        self._events.end_call()
        self.done = True

    def _open_parameter(self, text: str, at: int, final: bool) -> int:
        name = read_name(text, at + len(PARAMETER) - 1)
        if isinstance(name, bool) or name[1] == len(text):  # not yet a name, or nothing after it
            return self._over(len(text)) if final else at
        parameter, end = name
        is_text = self._types.types(parameter) == {"string"}
        self._events.arguments(("," if self._given else "{") + _dumps(parameter) + ":" + ('"' if is_text else ""))
        self._given.add(parameter)
        self._value = _Value(parameter, self._events if is_text else None)
        return end

    def _read(self, text: str, at: int, final: bool) -> int:
        value = self._value
        assert value is not None
        tag = _TAG.search(text, at)
        if tag is None:
            held = partial_tag(text, XML_TAGS)
            if final and not text.endswith("</", 0, len(text) - held + 2):
                held = 0  # the output ends in the beginning of a closing tag, or in text
            value.add(text[at : len(text) - held])
            return self._over(len(text)) if final else len(text) - held
        value.add(text[at : tag.start()])
        place = Place(self._wrapped, value.nesting.holds(tag[0]), value.at_line_start, self._fits)
        verdict = closing(text, tag.start(), place, final)
        if isinstance(verdict, Closed):
            if not verdict.next_parameter:
                return self._over(verdict.end)
            self._end_value()
            return verdict.end
        if verdict is None:
            return tag.start()
        value.nesting.note(tag[0], value.at_line_start)
        value.add(tag[0])
        return tag.end()

    def _fits(self, parameter: str, canonical: bool) -> bool:
        """A parameter the tool has and the call not yet; one it does not have only in the trained form."""
        return parameter not in self._given and (self._types.names(parameter) or canonical)

    def _end_value(self) -> None:
        value = self._value
        assert value is not None
        self._value = None
        if value.streamed:
            self._events.arguments('"')
        else:
            self._events.arguments(_dumps(self._types.convert(value.name, value.whole())))

    def _over(self, end: int) -> int:
        self.finish()
        return end


class _Value:
    """A parameter's text without the one newline after its opening and the one before its closing tag."""

    def __init__(self, name: str, stream: EventWriter | None) -> None:
        self.name = name
        self.nesting = Nesting()
        self.at_line_start = True
        self._stream = stream
        self._pieces: list[str] = []
        self._begun = False
        self._newline = False  # a newline that is given out only if text follows

    @property
    def streamed(self) -> bool:
        return self._stream is not None

    def add(self, text: str) -> None:
        if not text:
            return
        line = text.rpartition("\n")[2]
        self.at_line_start = not line.strip() and (self.at_line_start or "\n" in text)
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        if not text:
            return
        if self._newline:
            text = "\n" + text
        self._newline = text.endswith("\n")
        self._write(text.removesuffix("\n"))

    def whole(self) -> str:
        return "".join(self._pieces)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.arguments(_dumps(text)[1:-1])
        else:
            self._pieces.append(text)


def _dumps(value: object) -> str:
    return well_formed(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
