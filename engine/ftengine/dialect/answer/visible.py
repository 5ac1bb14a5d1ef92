"""Visible text on its way out: whitespace around calls is swallowed, and what the prompt prefilled is not repeated."""

from __future__ import annotations

from ftengine.dialect.answer.events import EventWriter


class VisibleText:
    """`holds_space`: a call may follow, so trailing whitespace waits for what comes."""

    def __init__(self, events: EventWriter, *, holds_space: bool, hidden: int) -> None:
        self._events = events
        self._holds_space = holds_space
        self._hidden = hidden  # characters of the prefilled text not yet passed
        self._space = ""
        self._said = False
        self._after_call = False  # nothing but whitespace since the last call

    def add(self, text: str) -> None:
        if self._hidden:
            skipped = min(self._hidden, len(text))
            self._hidden -= skipped
            text = text[skipped:]
        body = text.rstrip() if self._holds_space else text
        if not body:
            self._space += text
            return
        if self._said or not self._after_call:
            self._events.text(self._space)
        else:
            body = body.lstrip()
        self._events.text(body)
        self._space = text[len(text.rstrip()) :] if self._holds_space else ""
        self._said, self._after_call = True, False

    def call_begins(self) -> None:
        self._space = ""
        self._hidden = 0
        self._after_call = True

    def finish(self) -> None:
        if not self._after_call:
            self._events.text(self._space)
        self._space = ""
