"""Which dialect a checkpoint speaks, read from its template and vocabulary."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from ftengine.dialect.answer.parser import Grammar
from ftengine.dialect.answer.tags import CALL, FUNCTION, PARAMETER, THINK_END
from ftengine.dialect.base import Dialect
from ftengine.dialect.chat import ChatDialect
from ftengine.dialect.prompt.template import ChatTemplate
from ftengine.dialect.tokens import TokenCodec

log = logging.getLogger("ftengine.dialect")

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class CheckpointFiles(Protocol):
    """What is read of `ftengine.weights.checkpoint.Checkpoint`."""

    path: Path
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    vocab_size: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def tokenizer(self) -> Path | bytes: ...


def open_dialect(checkpoint: CheckpointFiles) -> Dialect:
    """Raises CheckpointError: no usable tokenizer.json, or a template that does not compile."""
    source = checkpoint.chat_template
    if source is None:
        log.warning("%s has no chat template: plain ChatML is used", checkpoint.path)
        source = demo_template()
    template = ChatTemplate(source, _named_tokens(checkpoint.tokenizer_config))
    codec = TokenCodec(checkpoint.tokenizer(), source)
    grammar = read_grammar(source)
    stops = _stops(checkpoint, codec, source)
    name = parser_name(grammar)
    return ChatDialect(name, template, codec, grammar, vocab_size=checkpoint.vocab_size, eos_token_ids=stops)


def parser_name(grammar: Grammar) -> str:
    """Of the form of tool calls that is read: xml, hermes (JSON in tags), or plain, which is none."""
    return "xml" if grammar.xml_calls else "hermes" if grammar.json_calls else "plain"


def read_grammar(template: str) -> Grammar:
    """The forms of output that a template shows its model. Templates that teach XML calls get both forms read."""
    xml = CALL in template and FUNCTION in template and PARAMETER in template
    hermes = CALL in template and '"arguments' in template.replace("\\", "")
    return Grammar(json_calls=xml or hermes, xml_calls=xml, reasoning=THINK_END in template)


def demo_template() -> str:
    """ChatML with tools in the Hermes form, for models whose own template has none. The store installs it."""
    return (resources.files("ftengine.dialect") / "templates" / "demo.jinja").read_text("utf-8")


def _named_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_TOKENS:
        value = tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _stops(checkpoint: CheckpointFiles, codec: TokenCodec, source: str) -> tuple[int, ...]:
    """The checkpoint's own, and what ends a turn in its template: generation_config.json often lacks one of them."""
    ids = [token for end in TURN_ENDS if end in source and (token := codec.token_id(end)) is not None]
    return tuple(dict.fromkeys((*checkpoint.eos_token_ids, *ids)))
