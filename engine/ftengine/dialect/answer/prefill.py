"""The beginning of a call that the prompt writes itself where the client demands one."""

from __future__ import annotations

import json

from ftengine.conversation import ToolChoice
from ftengine.dialect.answer.parser import Grammar
from ftengine.dialect.answer.tags import CALL, FUNCTION


def prefill(grammar: Grammar, choice: ToolChoice) -> str:
    """Empty where nothing is demanded or the form of calls is not known."""
    if choice.mode not in ("required", "named") or not grammar.openings:
        return ""
    name = choice.name if choice.mode == "named" else ""
    if grammar.xml_calls:
        return f"{CALL}\n{FUNCTION}" + (f"{name}>\n" if name else "")
    return f'{CALL}\n{{"name": ' + (f'{json.dumps(name, ensure_ascii=False)}, "arguments": ' if name else '"')
