"""A dialect of any family's template over the small vocabulary, with that family's control tokens added to it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from ftengine.dialect import Dialect, open_dialect
from ftengine.dialect.assembly import Assembler
from ftengine.dialect.base import Prompt
from tests.dialect.conftest import SMALL, Files

# Written out here from the families' tokenizer files, and not read from what the dialect finds out by itself.
_FORMS = re.compile(
    r"<\|[^|<>{}\s]+\|?>|<[a-z_]+\|>|<｜[^｜<>]+｜>|\]~!?b[\[\]]|\[e~\[|\[gMASK\]|<sop>|<bos>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|minimax:tool_call)>"
)
_ENDS = (
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<turn|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "<|endoftext|>",
)
BOS = {"gemma": "<bos>", "DeepSeek": "<｜begin▁of▁sentence｜>"}


@dataclass
class FamilyFiles(Files):
    content: bytes = b""

    def tokenizer(self) -> bytes:  # type: ignore[override]
        return self.content


@cache
def family(template: str, name: str = "") -> Dialect:
    """One for each template: what it remembers and keeps is shared by all tests."""
    return new_family(template, name)


def new_family(template: str, name: str = "") -> Dialect:
    bos = next((token for part, token in BOS.items() if part in name), "<|endoftext|>")
    tokenizer = json.loads((SMALL / "tokenizer.json").read_text("utf-8"))
    known = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for at, content in enumerate(sorted({*_FORMS.findall(template), bos} - known.keys())):
        known[content] = 8192 + at
        token = dict(tokenizer["added_tokens"][0], id=known[content], content=content)
        tokenizer["added_tokens"].append(token)
    ends = tuple(known[end] for end in _ENDS if end in known and (end in template or end == "<|endoftext|>"))
    config = {"bos_token": bos, "eos_token": "<|im_end|>"}
    raw = json.dumps(tokenizer).encode()
    return open_dialect(FamilyFiles(SMALL, template, config, eos_token_ids=ends, content=raw))


def render_cold(dialect: Dialect, conversation: object) -> Prompt:
    """As if no prompt had been rendered before; what was remembered of answers stays."""
    warm = dialect._assembler  # type: ignore[attr-defined]
    dialect._assembler = Assembler(dialect._codec, dialect._landmarks)  # type: ignore[attr-defined]
    try:
        return dialect.render(conversation)  # type: ignore[arg-type]
    finally:
        dialect._assembler = warm  # type: ignore[attr-defined]
