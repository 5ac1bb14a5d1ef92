"""Conversations of random tokens in an agent's form, and what agents do to them between two requests.

A conversation is a list of parts; its prompt is their tokens. Control tokens are ids of their own, as in a chat
template, so that the places where parts begin and end are known without any text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ftengine.core import Boundary, BoundaryKind

START, END, THINK_END, CALL, CALL_END, RESULT, RESULT_END = range(2, 9)
CONTROLS = (THINK_END, CALL, CALL_END)  # that a model writes in the middle of an answer
FIRST_PLAIN = 16


@dataclass(frozen=True)
class Part:
    """boundaries: positions within the part, 1..len(tokens), ascending."""

    kind: Literal["system", "user", "thinking", "answer", "result"]
    tokens: tuple[int, ...]
    boundaries: tuple[tuple[int, BoundaryKind], ...]


def message(kind: Literal["user", "answer"], *tokens: int) -> Part:
    return Part(kind, (*tokens, END), ((len(tokens) + 1, BoundaryKind.MESSAGE),))


def result(*tokens: int) -> Part:
    """Of a tool."""
    ends = ((1, BoundaryKind.RESULT_START), (len(tokens) + 2, BoundaryKind.RESULT_END))
    return Part("result", (RESULT, *tokens, RESULT_END), ends)


@dataclass
class Talk:
    """One session. sizes: of a part, least and most tokens."""

    name: str
    choose: random.Random
    vocabulary: int
    sizes: tuple[int, int]
    parts: list[Part] = field(default_factory=list)

    def begin(self, system: Part) -> Talk:
        self.parts = [system]
        self.ask()
        return self

    def prompt(self) -> tuple[list[int], list[Boundary]]:
        tokens: list[int] = []
        found: dict[int, BoundaryKind] = {}
        last_user = max((n for n, part in enumerate(self.parts) if part.kind == "user"), default=-1)
        for number, part in enumerate(self.parts):
            if number == last_user and tokens:
                found[len(tokens)] = BoundaryKind.LAST_USER
            found.update({len(tokens) + at: kind for at, kind in part.boundaries})
            tokens += part.tokens
        found[len(tokens)] = BoundaryKind.PROMPT_END
        return tokens, [Boundary(position, kind) for position, kind in sorted(found.items())]

    def plain(self, count: int) -> tuple[int, ...]:
        return tuple(self.choose.randrange(FIRST_PLAIN, self.vocabulary) for _ in range(count))

    def size(self) -> int:
        return self.choose.randint(*self.sizes)

    def system(self, count: int) -> Part:
        tokens = (START, *self.plain(count), END)
        return Part("system", tokens, ((len(tokens), BoundaryKind.SYSTEM),))

    def ask(self) -> None:
        self.parts.append(message("user", START, *self.plain(self.size())))

    def answered(self, generated: list[int]) -> None:
        """The model's turn and what follows it: a tool's output, or the user's next words."""
        cut = self.choose.randint(0, len(generated))
        self.parts += [Part("thinking", tuple(generated[:cut]), ()), message("answer", *generated[cut:])]
        if self.choose.random() < 0.7:
            self.parts.append(result(*self.plain(self.size())))
        else:
            self.ask()


def go_on(talk: Talk) -> None:
    """Nothing but what was appended."""


def drop_thinking(talk: Talk) -> None:
    talk.parts = [part for part in talk.parts if part.kind != "thinking"]


def replace_output(talk: Talk) -> None:
    results = [number for number, part in enumerate(talk.parts) if part.kind == "result"]
    if results:
        talk.parts[talk.choose.choice(results)] = result(FIRST_PLAIN)


def cut_block(talk: Talk) -> None:
    if len(talk.parts) > 4:
        begin = talk.choose.randrange(1, len(talk.parts) - 2)
        del talk.parts[begin : begin + talk.choose.randint(1, min(4, len(talk.parts) - 1 - begin))]


def truncate(talk: Talk) -> None:
    if len(talk.parts) > 3:
        del talk.parts[talk.choose.randrange(2, len(talk.parts)) :]
        talk.ask()


def cut_within(talk: Talk) -> None:
    """A part loses its end: an output that is cut to fit."""
    number = talk.choose.randrange(1, len(talk.parts))
    part = talk.parts[number]
    if len(part.tokens) > 2:
        talk.parts[number] = message("user", *part.tokens[: talk.choose.randrange(1, len(part.tokens))])


def compact(talk: Talk) -> None:
    talk.parts = talk.parts[:1]
    talk.ask()


EDITS: tuple[Callable[[Talk], None], ...] = (
    go_on,
    go_on,
    drop_thinking,
    replace_output,
    cut_block,
    cut_within,
    truncate,
    compact,
)
