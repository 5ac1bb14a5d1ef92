"""What Qwen3.6 would have written, token by token, to be answered as a recorded turn was.

The tokens are not those that the tokenizer would make of the text: it is cut into short pieces first. A model may write
any tokens, and only one that remembers them finds them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.support.exchanges import Call, Turn

END = "<|im_end|>"
PIECE = 37  # characters
_CONTROL = re.compile(r"(</?think>|</?tool_call>|<\|im_end\|>)")


def written(turn: Turn, *, in_reasoning: bool) -> str:
    """in_reasoning: the prompt ends with <think>; else reasoning is switched off, and there is none."""
    head = f"{turn.reasoning}\n</think>\n\n" if in_reasoning else ""
    calls = "\n".join(_call(call) for call in turn.calls)
    gap = "\n\n" if turn.text and calls else ""
    return f"{head}{turn.text}{gap}{calls}{END}"


def _call(call: Call) -> str:
    values = {"input": call.arguments} if call.freeform else call.values
    if values is None:  # broken off: in the other form of calls, since this one is not JSON
        return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}'
    parameters = "".join(f"<parameter={name}>\n{_value(value)}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tokens_of(text: str, encode: Callable[[str], list[int]], piece: int = PIECE) -> list[int]:
    """encode: of a dialect, which knows control tokens. piece: characters that are encoded together."""
    tokens: list[int] = []
    for part in _CONTROL.split(text):
        whole = [part] if _CONTROL.fullmatch(part) else [part[at : at + piece] for at in range(0, len(part), piece)]
        for text_piece in whole:
            tokens += encode(text_piece)
    return tokens
