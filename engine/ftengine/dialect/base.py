"""What a model family speaks: from a conversation to prompt tokens, from output text to events.

Torch-free. Knows nothing of HTTP or scheduling. `ftengine.dialect.open_dialect(checkpoint)` picks one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ftengine.conversation import Conversation, Event
from ftengine.core import Boundary


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. `parser_state` tells the output parser how the prompt ended."""

    text: str
    tokens: list[int]
    in_reasoning: bool = False  # the prompt ends inside <think>
    prefilled: str = ""  # text the prompt already put into the assistant's turn for tool_choice required/named
    boundaries: list[Boundary] = field(default_factory=list)  # positions ascending, one kind each; see assembly.py
    turn_start: int = -1  # tokens before the assistant's turn that the answer continues; -1: not known


class OutputParser(Protocol):
    """One answer's incremental grammar. The events' meaning does not depend on how the text was cut."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """No more text: give out what is held back, close what is open."""
        ...


class TokenDecoder(Protocol):
    """Token ids to text, incrementally; never gives out half a UTF-8 character."""

    def feed(self, tokens: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Dialect(Protocol):
    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    boundary_tokens: tuple[int, ...]  # ids after which, in an answer, reasoning ends or a call begins or ends

    def render(self, conversation: Conversation) -> Prompt:
        """Raises BadRequest when there is nothing to render; never because of malformed history."""
        ...

    def remember(
        self, conversation: Conversation, prompt: Prompt, tokens: Sequence[int], events: Sequence[Event]
    ) -> None:
        """Keeps an answer, so that `render` shows it in the history as it was generated, token by token.

        conversation, prompt: what `render` was given and gave. tokens: all that were generated, the stop token
        included, or as many as there were when the client left. events: those given out; they say which ids the
        calls got. Takes milliseconds for a long answer, so not on the event loop; never raises. An answer that was
        not whole is kept as far as it can be recognised when it comes back.
        """
        ...

    def save_answers(self, path: Path) -> None:
        """Writes what `remember` keeps to a file, 0600 and whole or not at all. Never raises; logs what went wrong."""
        ...

    def load_answers(self, path: Path) -> None:
        """Takes over such a file of the same template and tokenizer. One that is missing is nothing; never raises."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, special tokens parsed (for /v1/completions)."""
        ...

    def decoder(self) -> TokenDecoder: ...

    def parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser: ...

    def token_text(self, token: int) -> str:
        """One token's own text, for logprobs."""
        ...
