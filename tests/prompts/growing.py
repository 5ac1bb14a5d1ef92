"""A long session of Claude Code as its recordings would go on: one call after another, as long as is wanted."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

from tests.support.exchanges import Call, Exchange, Turn, exchanges

WORDS = ("the", "cache", "keeps", "a", "state", "at", "each", "place", "where", "an", "agent", "may", "cut", "file")
CLEARED = "[Old tool result content cleared]"


class GrowingSession:
    """requests: so far, each with the turn that answers it."""

    def __init__(self, words: int, seed: int = 3, name: str = "claude/tools") -> None:
        """words: of each tool's output, about as many tokens."""
        self._first = next(exchange for exchange in exchanges(name) if not exchange.side)
        self._choose = random.Random(seed)
        self._words = words
        self.messages: list[dict[str, Any]] = copy.deepcopy(self._first.body["messages"])
        self._calls = 0

    def request(self, text: str = "", *, end: bool = False) -> Exchange:
        """What the client sends now. Its answer, a call unless it is to end, is appended with the call's output."""
        sent = copy.deepcopy(self.messages)
        turn = Turn(text or "I will look.") if end else self._call()
        exchange = dataclasses.replace(
            self._first, name=f"grown/{self._calls:03}", body={**self._first.body, "messages": sent}, turn=turn
        )
        blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
        for call in turn.calls:
            # Claude Code rebuilds the object: another order than the model's.
            values = dict(sorted((call.values or {}).items(), reverse=True))
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
        self.messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": self._text(self._words)} for call in turn.calls
        ]
        if results:
            self.messages.append({"role": "user", "content": results})
        return exchange

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def clear_output(self, number: int) -> None:
        """An old tool's output gives way to a placeholder."""
        message = [message for message in self.messages if _is_result(message)][number]
        message["content"][0]["content"] = CLEARED

    def cut(self, begin: int, end: int) -> None:
        """Takes calls `begin` to `end` and their outputs out."""
        places = [index for index, message in enumerate(self.messages) if _is_result(message)]
        del self.messages[places[begin] - 1 : places[end] - 1]

    def rewind(self, calls: int) -> None:
        places = [index for index, message in enumerate(self.messages) if _is_result(message)]
        del self.messages[places[-calls] - 1 :]

    def _call(self) -> Turn:
        self._calls += 1
        values = f'{{"command": "cat part{self._calls}.txt", "description": "{self._text(3)}"}}'
        said = self._text(8) if self._calls % 3 == 0 else ""
        return Turn(said, calls=(Call(f"toolu_{self._calls:024}", "Bash", values),))

    def _text(self, words: int) -> str:
        return " ".join(self._choose.choices(WORDS, k=words))


def _is_result(message: dict[str, Any]) -> bool:
    content = message["content"]
    return isinstance(content, list) and bool(content) and content[0].get("type") == "tool_result"
