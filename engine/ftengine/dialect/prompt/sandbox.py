"""jinja2's sandbox with bounds: a checkpoint's template is somebody else's program.

The sandbox keeps it from reaching Python. What it leaves open is time and memory, so every loop pass counts against a
deadline, and operations that grow text or numbers are checked before they are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context

from ftengine.dialect.prompt.quick import QuickEnvironment

MAX_SECONDS = 10.0
MAX_CHARACTERS = 32 << 20
MAX_BITS = 4096
_LOOK_EVERY = 64  # steps, at the clock
BOUNDS = "ft_bounds"  # the name under which a rendering is given its Bounds
STEP, JOIN = "ft_step", "ft_join"  # filters over them


class Bounds:
    """One rendering's allowance."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._left = _LOOK_EVERY

    def step(self) -> str:
        self._left -= 1
        if self._left:
            return ""
        self._left = _LOOK_EVERY
        if time.monotonic() > self._deadline:
            raise TemplateRuntimeError("the template takes too long")
        return ""

    def join(self, *values: Any) -> str:
        """The `~` operator."""
        return self.written("".join(map(str, values)))

    def written(self, text: str) -> str:
        if len(text) > MAX_CHARACTERS:
            raise TemplateRuntimeError("the template writes too much")
        return text


class BoundedEnvironment(QuickEnvironment):
    """Templates compiled with `compile_bounded` use the `Bounds` that are given under BOUNDS."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[STEP] = Bounds.step
        self.filters[JOIN] = Bounds.join

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str is type(right) and len(left) + len(right) <= MAX_CHARACTERS:
            return left + right
        if _grows_beyond(operator, left, right):
            raise TemplateRuntimeError("the template computes something too large")
        return super().call_binop(context, operator, left, right)

    def compile_bounded(self, source: str) -> Any:
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, _step())
        for macro in list(tree.find_all(nodes.Macro)):
            macro.body.insert(0, _step())
        _replace(tree, nodes.Concat, lambda concat: _join(concat.nodes))
        tree.set_environment(self)
        return self.from_string(tree)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt it is a plain block."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _grows_beyond(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and any(character.isdigit() or character == "*" for character in left)
    if operator == "**":
        return not isinstance(right, (int, float)) or abs(right) > MAX_BITS or _bits(left) * abs(right) > MAX_BITS
    if operator == "+":
        return _length(left) + _length(right) > MAX_CHARACTERS
    if _length(left) or _length(right):
        count = right if _length(left) else left
        return isinstance(count, int) and (_length(left) or _length(right)) * max(count, 0) > MAX_CHARACTERS
    return _bits(left) + _bits(right) > MAX_BITS


def _length(value: Any) -> int:
    """Characters, or about as many of them as a list takes memory."""
    return len(value) * (1 if isinstance(value, str) else 32) if isinstance(value, (str, list, tuple)) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _join(parts: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(nodes.Name(BOUNDS, "load"), JOIN, parts, [], None, None)


def _step() -> nodes.Stmt:
    """As a filter, which is called directly and not by way of the sandbox."""
    return nodes.ExprStmt(nodes.Filter(nodes.Name(BOUNDS, "load"), STEP, [], [], None, None))


def _replace(node: nodes.Node, kind: type[nodes.Node], change: Callable[[Any], nodes.Node]) -> None:
    """Replaces every node of a kind below `node`, inner ones first."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace(value, kind, change)
            if isinstance(value, kind):
                setattr(node, field, change(value))
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, nodes.Node):
                    _replace(item, kind, change)
            value[:] = [change(item) if isinstance(item, kind) else item for item in value]
