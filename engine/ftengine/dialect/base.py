"""What a model family speaks: from a conversation to prompt tokens, from output text to events.

Torch-free. Knows nothing of HTTP or scheduling. `ftengine.dialect.open_dialect(checkpoint)` picks one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ftengine.conversation import Conversation, Event


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. `parser_state` tells the output parser how the prompt ended."""

    text: str
    tokens: list[int]
    in_reasoning: bool = False  # the prompt ends inside <think>
    prefilled: str = ""  # text the prompt already put into the assistant's turn for tool_choice required/named


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

    def render(self, conversation: Conversation) -> Prompt:
        """Raises BadRequest when there is nothing to render; never because of malformed history."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, special tokens parsed (for /v1/completions)."""
        ...

    def decoder(self) -> TokenDecoder: ...

    def parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser: ...

    def token_text(self, token: int) -> str:
        """One token's own text, for logprobs."""
        ...
