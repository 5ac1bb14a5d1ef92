"""The grammar of one answer: reasoning, visible text and calls, the same events however the text is cut.

Text is taken as soon as its meaning is certain and held back until then. A call is one only where it can be one: not
in reasoning, not in Markdown code, and only when the whole opening is there; a tag that is merely named stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ftengine.conversation import Event
from ftengine.dialect.answer.events import EventWriter
from ftengine.dialect.answer.json_call import JsonCall
from ftengine.dialect.answer.markdown import CodeTracker
from ftengine.dialect.answer.schema import ParameterTypes
from ftengine.dialect.answer.tags import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    THINK,
    THINK_END,
    begins,
    partial_tag,
    read_name,
    skip_space,
)
from ftengine.dialect.answer.visible import VisibleText
from ftengine.dialect.answer.xml_call import XmlCall
from ftengine.dialect.tools import Toolbox

_SPARE_BRACES = re.compile(r"\}[\s}]*")
# Characters read as JSON calls that were none. A model that repeats an unfinished one without end would have each of
# them read to the end of the answer.
_MOST_MISREAD = 1 << 20


@dataclass(frozen=True)
class Grammar:
    """What a checkpoint's answers may hold; read from its template."""

    json_calls: bool = False  # <tool_call>{"name": …, "arguments": …}</tool_call>
    xml_calls: bool = False  # <tool_call><function=…><parameter=…>…
    reasoning: bool = False  # <think>…</think> first

    @property
    def openings(self) -> tuple[str, ...]:
        return (CALL, FUNCTION) if self.xml_calls else (CALL,) if self.json_calls else ()


class AnswerParser:
    """`toolbox` empty: calls stay text. `prefilled`: what the prompt already wrote of the answer."""

    def __init__(self, grammar: Grammar, toolbox: Toolbox, *, in_reasoning: bool = False, prefilled: str = "") -> None:
        self._grammar = grammar
        self._toolbox = toolbox
        self._openings = grammar.openings if toolbox else ()
        self._opening_pattern = re.compile("|".join(map(re.escape, self._openings)) or "(?!)")
        self._events = EventWriter()
        self._visible = VisibleText(self._events, holds_space=bool(self._openings), hidden=len(prefilled))
        self._code = CodeTracker()
        self._in_reasoning = in_reasoning
        self._reasoned = False  # some reasoning was given out
        self._call: JsonCall | XmlCall | None = None
        self._in_wrapper = False  # a <tool_call> is open behind a finished JSON call
        self._misread = 0  # see _MOST_MISREAD
        self._rest = prefilled
        self._at = 0
        self._undecided = -1  # where the text of a call begins that may still turn out to be none
        self._step: Callable[[bool], bool] = self._begin if not prefilled else self._text

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[Event]:
        events = self._run(final=True)
        self._visible.finish()
        return events + self._events.take()

    def _run(self, final: bool) -> list[Event]:
        while self._step(final):
            pass
        keep = self._at if self._undecided < 0 else min(self._at, self._undecided)
        self._rest = self._rest[keep:]
        self._at -= keep
        self._undecided -= keep if self._undecided >= 0 else 0
        return self._events.take()

    def _begin(self, final: bool) -> bool:
        if not (self._grammar.reasoning or self._in_reasoning):
            self._step = self._text
            return True
        here = skip_space(self._rest, self._at)
        if not final and begins(self._rest, here, (THINK,)):
            return False
        if self._rest.startswith(THINK, here):
            self._at = here + len(THINK)
            self._step = self._reasoning
        else:
            self._step = self._reasoning if self._in_reasoning else self._text
        return True

    def _reasoning(self, final: bool) -> bool:
        rest = self._rest
        end = rest.find(THINK_END, self._at)
        stop = end if end >= 0 else len(rest) - (0 if final else partial_tag(rest, (THINK_END,)))
        begin = self._at if self._reasoned else min(skip_space(rest, self._at), stop)
        body = rest[begin:stop].rstrip()
        if body:
            self._events.reasoning(body)
            self._reasoned = True
        self._at = begin + len(body)
        if end < 0:
            return False
        self._at = end + len(THINK_END)
        self._step = self._after_reasoning
        return True

    def _after_reasoning(self, final: bool) -> bool:
        self._at = skip_space(self._rest, self._at)
        if self._at == len(self._rest):
            return False
        self._step = self._text
        return True

    def _text(self, final: bool) -> bool:
        rest = self._rest
        opening = self._opening_pattern.search(rest, self._at)
        held = 0 if final or opening else partial_tag(rest, self._openings)
        stop = opening.start() if opening else max(self._at, len(rest) - held)
        self._say(stop)
        if opening is None:
            return False
        verdict = self._open_call(opening[0], final)
        if verdict is False:
            self._say(opening.end())
        return verdict is not None

    def _say(self, stop: int) -> None:
        text = self._rest[self._at : stop]
        self._at = stop
        self._code.feed(text)
        self._visible.add(text)

    def _open_call(self, tag: str, final: bool) -> bool | None:
        """Whether the tag here opens a call. None: more text is needed to know."""
        if self._code.in_inline_code:
            return False
        if self._code.in_fence:
            if self._code.fence_closes(self._rest[self._at :], final):
                return False
            if not final:
                return None  # an example will be followed by the fence's end; a call after a forgotten one will not
        if tag == FUNCTION:
            return self._open_xml(self._at, wrapped=False, final=final) if self._code.at_line_start else False
        here = skip_space(self._rest, self._at + len(CALL))
        if self._grammar.json_calls and self._misread <= _MOST_MISREAD and self._rest.startswith("{", here):
            return self._open_json(self._at, here)
        if self._grammar.xml_calls and self._rest.startswith(FUNCTION, here):
            return self._open_xml(here, wrapped=True, final=final)
        if final:
            return False
        forms = ("{",) * self._grammar.json_calls + (FUNCTION,) * self._grammar.xml_calls
        return None if begins(self._rest, here, forms) else False

    def _open_json(self, begin: int, brace: int) -> bool:
        self._undecided = begin
        self._call = JsonCall(self._toolbox, self._events)
        self._at = brace
        self._step = self._json_call
        return True

    def _open_xml(self, at: int, wrapped: bool, final: bool) -> bool | None:
        rest = self._rest
        named = read_name(rest, at + len(FUNCTION) - 1)
        if isinstance(named, bool):
            return None if named and not final else False
        name, end = named
        tool = self._toolbox.find(name)
        if tool is None and not wrapped:
            return False
        types = ParameterTypes(tool)
        here = skip_space(rest, end)
        parameter = read_name(rest, here + len(PARAMETER) - 1) if rest.startswith(PARAMETER, here) else False
        if not isinstance(parameter, bool):
            return self._begin_xml(name, types, wrapped, here)
        if rest.startswith(FUNCTION_END, here) or (tool is not None and rest.startswith(CALL_END, here)):
            return self._begin_xml(name, types, wrapped, here, empty=True)
        if not (parameter or begins(rest, here, (PARAMETER, FUNCTION_END, CALL_END))):
            return False
        if not final:
            return None
        if wrapped and tool is not None and not types.required:  # cut off where nothing needs to follow
            return self._begin_xml(name, types, wrapped, len(rest), empty=True)
        return False

    def _begin_xml(self, name: str, types: ParameterTypes, wrapped: bool, at: int, *, empty: bool = False) -> bool:
        self._at = at
        self._visible.call_begins()
        self._call = XmlCall(name, types, wrapped, self._events)
        self._step = self._xml_call
        if empty:
            self._call.finish()
            self._step = self._after_call
        return True

    def _xml_call(self, final: bool) -> bool:
        assert isinstance(self._call, XmlCall)
        self._at = self._call.consume(self._rest, self._at, final)
        if not self._call.done:
            return False
        self._step = self._after_call
        return True

    def _json_call(self, final: bool) -> bool:
        call = self._call
        assert isinstance(call, JsonCall)
        self._at = call.consume(self._rest, self._at, final)
        if call.started and self._undecided >= 0:
            self._undecided = -1
            self._visible.call_begins()
        if call.failed:
            self._misread += self._at - self._undecided
            self._at, self._undecided = self._undecided, -1
            tag = CALL if self._rest.startswith(CALL, self._at) else "{"
            self._say(self._at + len(tag))
            self._step = self._text
            return True
        if not call.done:
            return False
        self._in_wrapper = True
        self._step = self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        """Swallows closings and whitespace; a second JSON object in one wrapper is a second call."""
        rest = self._rest
        here = skip_space(rest, self._at)
        for tag in (CALL_END, FUNCTION_END):
            if rest.startswith(tag, here):
                self._at = here + len(tag)
                self._in_wrapper = False
                return True
        if not final and begins(rest, here, (CALL_END, FUNCTION_END)):
            return False
        if self._in_wrapper and rest.startswith("{", here):
            return self._open_json(here, here)
        braces = _SPARE_BRACES.match(rest, here) if self._in_wrapper else None
        if braces and rest.startswith(CALL_END, braces.end()):
            self._at = braces.end()
            return True
        if braces and not final and begins(rest, braces.end(), (CALL_END,)):
            return False
        self._in_wrapper = False
        self._code.new_line()
        self._step = self._text
        return True
