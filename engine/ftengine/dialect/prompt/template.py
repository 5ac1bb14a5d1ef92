"""The checkpoint's chat template, with the names and filters that Hugging Face's templates count on.

The conventions (trimmed blocks, loop controls, `tojson` that keeps key order and writes HTML and other characters as
they are, `raise_exception`, `strftime_now`) are those of transformers' `apply_chat_template`; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError

from ftengine.dialect.prompt.sandbox import (
    BOUNDS,
    MAX_CHARACTERS,
    MAX_SECONDS,
    BoundedEnvironment,
    Bounds,
    GenerationTag,
)
from ftengine.errors import CheckpointError


class TemplateRefused(Exception):
    """The template raised, on purpose or not. `str(error)` is its own reason."""


class ChatTemplate:
    """`variables` are those that every rendering gets, as a rule the special tokens; `seconds` may one take."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, seconds: float = MAX_SECONDS) -> None:
        self.source = source
        self._seconds = seconds
        self._variables = dict(variables)
        try:
            self._template = _environment().compile_bounded(source)
        except (TemplateError, RecursionError, ValueError, TypeError, SyntaxError) as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """Raises TemplateRefused."""
        bounds = Bounds(self._seconds)
        names = {**self._variables, **variables, BOUNDS: bounds, "messages": messages}
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**names):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise TemplateRefused("the template writes too much")
        except Exception as error:  # whatever a stranger's program can raise
            raise TemplateRefused(str(error) or type(error).__name__) from None
        return "".join(parts)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
