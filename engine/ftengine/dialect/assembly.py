"""From a rendered prompt to its tokens, and the places in them that are worth going on from.

An agent's prompt is its last one and something more. What the last ones became is kept, with a checkpoint before each
message, and work begins at the last checkpoint up to which the rendered text and the answers in it are the same. The
outcome is that of beginning at the start: where control tokens are found depends on no text further away than the
longest of them, and what follows an opening one on nothing before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftengine.core import Boundary, BoundaryKind
from ftengine.dialect.control import unguarded
from ftengine.dialect.generations import Generated
from ftengine.dialect.landmarks import Landmarks
from ftengine.dialect.splice import Splice, find_splice
from ftengine.dialect.tokens import TokenCodec

KEPT = 8  # prompts; each takes about 16 bytes a token and three times its text


@dataclass(frozen=True)
class Checkpoint:
    """How much there was of everything before the control token that opens a message."""

    characters: int = 0  # of the rendered text
    texts: int = 0
    tokens: int = 0
    places: int = 0
    messages: int = 0
    turns: int = 0  # the assistant's


_START = Checkpoint()


@dataclass
class Assembled:
    """A prompt. `answers`: for each assistant turn of the history, what the model wrote then."""

    rendered: str  # by the template, content guarded
    answers: Sequence[Generated | None]
    texts: list[str] = field(default_factory=list)  # joined: what the model sees
    tokens: list[int] = field(default_factory=list)
    places: list[tuple[int, BoundaryKind]] = field(default_factory=list)  # inside messages
    messages: list[tuple[int, str]] = field(default_factory=list)  # tokens before, role; without the system's
    checkpoints: list[Checkpoint] = field(default_factory=list)  # one a message

    @property
    def turn_start(self) -> int:
        """See base.Prompt."""
        return self.messages[-1][0] if self.messages and self.messages[-1][1] == "assistant" else -1

    def boundaries(self) -> list[Boundary]:
        """Of two kinds at one position the more valuable one, which is written later here."""
        kinds = dict(self.places)
        kinds.update(dict.fromkeys([position for position, _ in self.messages], BoundaryKind.MESSAGE))
        kinds[len(self.tokens)] = BoundaryKind.PROMPT_END
        last_user = max((number for number, (_, role) in enumerate(self.messages) if role == "user"), default=-1)
        if last_user >= 0:
            question = [position for position, _ in self.messages[last_user : last_user + 2]]
            kinds.update(zip(question, (BoundaryKind.LAST_USER, BoundaryKind.QUESTION_END), strict=False))
        if self.checkpoints:
            kinds[self.messages[0][0]] = BoundaryKind.SYSTEM
        kinds.pop(0, None)
        return [Boundary(position, kinds[position]) for position in sorted(kinds)]

    def up_to(self, point: Checkpoint, rendered: str, answers: Sequence[Generated | None]) -> Assembled:
        """The beginning of another prompt that is the same so far."""
        return Assembled(
            rendered,
            answers,
            self.texts[: point.texts],
            self.tokens[: point.tokens],
            self.places[: point.places],
            self.messages[: point.messages],
            self.checkpoints[: point.messages],
        )


class Assembler:
    """Safe to use from several threads."""

    def __init__(self, codec: TokenCodec, landmarks: Landmarks) -> None:
        self._codec = codec
        self._landmarks = landmarks
        self._recent: list[Assembled] = []  # newest last
        self._lock = threading.Lock()

    def assemble(self, rendered: str, answers: Sequence[Generated | None]) -> Assembled:
        """Where the template made another number of assistant turns than there were, no answer takes a turn's place."""
        with self._lock:
            recent = self._recent[::-1]
        begin, grown = _START, None
        for earlier in recent:
            point = self._shared(earlier, rendered, answers)
            if point.characters > begin.characters:
                begin, grown = point, earlier
        prompt = grown.up_to(begin, rendered, answers) if grown is not None else Assembled(rendered, answers)
        pieces = self._codec.control.pieces(rendered[begin.characters :])
        roles = self._landmarks.roles(pieces)
        opened = [at for at, role in roles.items() if role == "assistant"]
        if begin.turns + len(opened) != len(answers) + 1 and any(answer is not None for answer in answers):
            return self.assemble(rendered, [None] * len(answers))
        splices = {}
        for at, answer in zip(opened, answers[begin.turns :], strict=False):
            splice = find_splice(pieces, at, roles.keys(), self._landmarks, answer) if answer is not None else None
            if answer is not None and splice is not None:
                splices[splice.begin] = splice, answer
        self._go_on(prompt, begin, pieces, roles, splices)
        with self._lock:
            others = [kept for kept in self._recent if kept is not grown]
            self._recent = [*others[1 - KEPT :], prompt]
        return prompt

    def _shared(self, earlier: Assembled, rendered: str, answers: Sequence[Generated | None]) -> Checkpoint:
        """The last checkpoint at which both prompts are still the same."""
        reach = _common(earlier.rendered, rendered) - self._codec.control.longest
        pairs = zip(earlier.answers, answers, strict=False)
        turns = next((at for at, (one, other) in enumerate(pairs) if one is not other), len(answers))
        return next(
            (point for point in reversed(earlier.checkpoints) if point.characters <= reach and point.turns <= turns),
            _START,
        )

    def _go_on(
        self,
        prompt: Assembled,
        begin: Checkpoint,
        pieces: list[str],
        roles: dict[int, str],
        splices: dict[int, tuple[Splice, Generated]],
    ) -> None:
        """Adds pieces to a prompt. pieces: text and control tokens in turn, from checkpoint `begin` on."""
        marks, encoded = self._landmarks.marks, self._codec.encode_pieces(pieces, at_start=begin is _START)
        characters, turns = begin.characters, begin.turns
        role, at, after = "", 0, 0
        while at < len(pieces):
            if at in roles:
                role = roles[at]
                characters += sum(map(len, pieces[after:at]))
                after = at
                prompt.checkpoints.append(_checkpoint(prompt, characters, turns))
                prompt.messages.append((len(prompt.tokens), role))
                turns += role == "assistant"
            if at in splices:
                splice, answer = splices[at]
                self._insert(prompt, splice, answer)
                at = splice.end
                continue
            piece = pieces[at]
            prompt.tokens += encoded[at]
            prompt.texts.append(unguarded(piece))
            if at % 2 and piece in marks and role in marks[piece][1]:
                prompt.places.append((len(prompt.tokens), marks[piece][0]))
            if not self._landmarks.openers and piece in self._landmarks.turn_ends:
                prompt.messages.append((len(prompt.tokens), "user"))  # where roles are plain text
            at += 1

    def _insert(self, prompt: Assembled, splice: Splice, answer: Generated) -> None:
        """The tokens that were generated."""
        first, marks = splice.control, self._landmarks.marks
        base = len(prompt.tokens) - first.token
        dropped = 1 if answer.stop and not splice.with_stop else 0
        written = memoryview(answer.tokens).cast("i")
        prompt.tokens.extend(written[first.token : len(written) - dropped])
        prompt.texts.append(answer.text[first.character : len(answer.text) - dropped * len(answer.stop)])
        for index, control in enumerate(answer.controls):
            # A call's mark inside the reasoning is part of it.
            if control.token >= first.token and index >= answer.think_end and control.content in marks:
                prompt.places.append((base + control.token + 1, marks[control.content][0]))


def _checkpoint(prompt: Assembled, characters: int, turns: int) -> Checkpoint:
    return Checkpoint(
        characters, len(prompt.texts), len(prompt.tokens), len(prompt.places), len(prompt.messages), turns
    )


def _common(first: str, second: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
