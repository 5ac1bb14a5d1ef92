"""The tags of the two call forms, and how much of one must be seen before it is one."""

from __future__ import annotations

import re

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
THINK, THINK_END = "<think>", "</think>"

XML_TAGS = (PARAMETER_END, FUNCTION_END, CALL_END, PARAMETER, FUNCTION, CALL)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"=[ \t]*[\"']?([^<>=\"'\s][^<>=\"'\n]{0,254}?)[\"']?[ \t]*>")
_NAME_BEGUN = re.compile(r"=[ \t]*[\"']?(?:[^<>=\"'\s][^<>=\"'\n]{0,254}?)?[\"']?[ \t]*")


def skip_space(text: str, at: int = 0) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def begins(text: str, at: int, tags: tuple[str, ...]) -> bool:
    """Whether the text ends, at `at`, in what may become one of the tags. True also where it just ends."""
    rest = text[at : at + 16]
    return any(len(rest) < len(tag) and tag.startswith(rest) for tag in tags)


def partial_tag(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest end of the text that may become one of the tags."""
    at = text.rfind("<", max(0, len(text) - 16))
    return len(text) - at if at >= 0 and begins(text, at, tags) else 0


def read_name(text: str, at: int) -> tuple[str, int] | bool:
    """Name and end of `=NAME>` at `at`. True: it may still become one with more text. False: it cannot."""
    match = _NAME.match(text, at)
    if match:
        return match[1], match.end()
    return _NAME_BEGUN.fullmatch(text, at) is not None
