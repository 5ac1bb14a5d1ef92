"""JSON as a model writes it, to compact valid JSON, while it comes.

What is valid passes through with whitespace between tokens taken out. What models get wrong is set right: raw control
characters and impossible escapes in strings, unescaped quotes inside strings, single quotes, Python's True and None,
trailing commas, a missing end. The output so far plus `close()` is one valid JSON value at every moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

END_TAG = "</tool_call>"
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")
_SPACE = re.compile(r"[ \t\r\n]*")
_BARE = re.compile(r"[^\s,:\[\]{}\"'<]+")
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null", "nan": "null", "undefined": "null"}
_MAX_DEPTH = 200

_Expect = Literal["value", "key", "colon", "comma", "done"]


class JsonStream:
    """One JSON value. `consume` takes text from a position on and says how far it got; `output` collects.

    `done`: the value is complete. `broken`: what follows cannot be JSON; nothing more is taken.
    With `member`, the value must be an object and only its members' values are put out: `member(key)` is called
    before each, so that `output` can be changed for it.
    """

    def __init__(self, member: Callable[[str], None] | None = None) -> None:
        self.output: list[str] = []
        self._member = member
        self.done = False
        self.broken = False
        self._stack: list[str] = []  # "{" and "["
        self._counts: list[int] = []  # members written of each open container
        self._expect: _Expect = "value"
        self._quote = ""  # of the open string
        self._key: list[str] | None = None  # the key being read or waiting for its value

    def consume(self, text: str, at: int, final: bool) -> int:
        """Position after what was taken. Text left over is undecided: call again with more of it."""
        while not (self.done or self.broken):
            if self._quote:
                after = self._in_string(text, at, final)
            else:
                at = _skip_space(text, at)
                after = self._token(text, at, final) if at < len(text) else None
            if after is None:
                return at
            at = after
        return at

    @property
    def between(self) -> bool:
        """No member of the outermost object is being read."""
        return self.done or (len(self._stack) == 1 and (not self._quote or self._expect == "key"))

    def close(self) -> None:
        """Ends whatever is open."""
        if self._quote:
            self._end_string()
        if not self._stack and self._expect == "value":
            self._write("null")
        while self._stack:
            self._pop()
        self.done = True

    def _token(self, text: str, at: int, final: bool) -> int | None:
        character = text[at]
        if character in "}]":
            return self._closer(character, at)
        if self._expect in ("comma", "colon"):
            if character != ("," if self._expect == "comma" else ":"):
                return self._break(at)
            self._expect = "key" if self._expect == "comma" and self._stack[-1] == "{" else "value"
            return at + 1
        if character in "\"'":
            return self._start_string(character, at)
        if character in "{[":
            return self._opener(character, at)
        return self._bare_word(text, at, final)

    def _opener(self, character: str, at: int) -> int:
        if self._expect == "key" or len(self._stack) >= _MAX_DEPTH:
            return self._break(at)
        self._write(character)
        self._stack.append(character)
        self._counts.append(0)
        self._expect = "key" if character == "{" else "value"
        return at + 1

    def _closer(self, character: str, at: int) -> int:
        fits = self._stack and (self._stack[-1] == "{") == (character == "}")
        if not fits or self._expect == "colon" or (self._expect == "value" and character == "}"):
            return self._break(at)
        self._pop()
        return at + 1

    def _pop(self) -> None:
        self._key = None
        bracket = "}" if self._stack.pop() == "{" else "]"
        if self._stack or self._member is None:
            self.output.append(bracket)
        self._counts.pop()
        self._after_value()

    def _bare_word(self, text: str, at: int, final: bool) -> int | None:
        word = _BARE.match(text, at)
        if word is None:
            return self._break(at)
        if word.end() == len(text) and not final:
            return None
        if self._expect == "key":
            self._key, self._expect = [_escape(word[0])], "colon"
        else:
            self._write(_scalar(word[0]))
            self._after_value()
        return word.end()

    def _start_string(self, quote: str, at: int) -> int:
        self._quote = quote
        if self._expect == "key":
            self._key = []
        else:
            self._write('"')
        return at + 1

    def _in_string(self, text: str, at: int, final: bool) -> int | None:
        if at >= len(text):
            return None
        plain = _PLAIN.match(text, at)
        if plain:
            self._string_text(plain[0])
            return plain.end()
        character = text[at]
        if character == "\\":
            return self._escaped(text, at, final)
        if character != self._quote:
            self._string_text(_escape(character))
            return at + 1
        closes = self._closes(text, at + 1, final)
        if closes:
            self._end_string()
        elif closes is False:
            self._string_text(_escape(character))
        return None if closes is None else at + 1

    def _closes(self, text: str, at: int, final: bool) -> bool | None:
        """Whether a quote ends its string, judged by what follows; None: not yet known.

        Valid JSON always passes. A quote that is followed by anything else belongs to the string's own text.
        """
        at = _skip_space(text, at)
        if at == len(text):
            return True if final else None
        if self._expect == "key":
            return text[at] == ":"
        if text[at] == "," and self._stack and self._stack[-1] == "{":
            at = _skip_space(text, at + 1)
            if at == len(text):
                return True if final else None
            return text[at] in "\"'}"
        if text[at] in ",}]":
            return True
        rest = text[at : at + len(END_TAG)]
        if not final and END_TAG.startswith(rest) and rest != END_TAG:
            return None
        return rest == END_TAG

    def _escaped(self, text: str, at: int, final: bool) -> int | None:
        needed = 12 if _HIGH.match(text, at) else 6 if text.startswith("\\u", at) else 2
        if len(text) - at < needed and not final:
            return None
        if _HIGH.match(text, at):
            pair = _LOW.match(text, at + 6)
            self._string_text(text[at : at + 12] if pair else "\\ufffd")
            return at + (12 if pair else 6)
        if _UNICODE.match(text, at):
            self._string_text("\\ufffd" if _LOW.match(text, at) else text[at : at + 6])
            return at + 6
        character = text[at + 1 : at + 2]
        if character and character in '"\\/bfnrt':
            self._string_text("\\" + character)
        elif character == "'":
            self._string_text("'")
        elif character:
            self._string_text("\\\\" + _escape(character))
        return min(at + 2, len(text))

    def _string_text(self, text: str) -> None:
        if self._expect == "key" and self._key is not None:
            self._key.append(text)
        else:
            self.output.append(text)

    def _end_string(self) -> None:
        self._quote = ""
        if self._expect == "key":
            self._expect = "colon"
        else:
            self.output.append('"')
            self._after_value()

    def _write(self, text: str) -> None:
        """Begins a value: its comma and key first."""
        if self._member is not None and len(self._stack) < 2:
            if not self._stack:
                return
            self._member("".join(self._key or ()))
            self._key = None
        elif self._stack:
            comma = "," if self._counts[-1] else ""
            key = f'"{"".join(self._key)}":' if self._key is not None else ""
            self._counts[-1] += 1
            self._key = None
            text = comma + key + text
        self.output.append(text)

    def _after_value(self) -> None:
        self._expect = "comma" if self._stack else "done"
        self.done = not self._stack

    def _break(self, at: int) -> int:
        self.broken = True
        return at


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _scalar(word: str) -> str:
    if _NUMBER.fullmatch(word):
        return word
    return _LITERALS.get(word.lower()) or f'"{_escape(word)}"'
