"""Where in Markdown the text stands: tags quoted as code are no calls."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)
_KEPT = 256  # characters of a line that can matter to its fence


class CodeTracker:
    """Follows visible text as it comes and knows whether the next character is inside code."""

    def __init__(self) -> None:
        self._fence = ""  # the open fence's marker
        self._line = ""  # the current line's beginning
        self._backticks = 0  # in the current line
        self._blank = True  # nothing but spaces in the current line

    @property
    def in_fence(self) -> bool:
        return bool(self._fence)

    @property
    def in_inline_code(self) -> bool:
        return not self._fence and self._backticks % 2 == 1

    @property
    def at_line_start(self) -> bool:
        return self._blank

    def fence_closes(self, text: str, final: bool) -> bool:
        """Whether the open fence ends in the text that follows; the last line counts only when it is whole."""
        lines = text.split("\n")[1:] if final else text.split("\n")[1:-1]
        return any(self._is_end(line) for line in lines)

    def feed(self, text: str) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            self._extend(line)
            self._end_line()
        self._extend(rest)

    def new_line(self) -> None:
        """A call stood here: what follows begins afresh, outside code."""
        self._fence = ""
        self._end_line()

    def _extend(self, text: str) -> None:
        if len(self._line) < _KEPT:
            self._line = (self._line + text)[:_KEPT]
        self._backticks += text.count("`")
        self._blank = self._blank and not text.strip()

    def _end_line(self) -> None:
        fence = _FENCE.fullmatch(self._line)
        if self._fence:
            self._fence = "" if self._is_end(self._line) else self._fence
        elif fence and not (fence[1][0] == "`" and "`" in fence[2]):
            self._fence = fence[1]
        self._line, self._backticks, self._blank = "", 0, True

    def _is_end(self, line: str) -> bool:
        fence = _FENCE.fullmatch(line)
        return fence is not None and fence[1].startswith(self._fence) and not fence[2].strip()
