"""A dialect made of the checkpoint's own template and tokenizer, and a grammar for what it answers."""

from __future__ import annotations

import logging
from typing import Any

from ftengine.conversation import Conversation
from ftengine.dialect.answer.parser import AnswerParser, Grammar
from ftengine.dialect.answer.prefill import prefill
from ftengine.dialect.base import OutputParser, Prompt, TokenDecoder
from ftengine.dialect.prompt.adapt import adapt, as_messages, with_user
from ftengine.dialect.prompt.capabilities import probe
from ftengine.dialect.prompt.template import ChatTemplate, TemplateRefused
from ftengine.dialect.prompt.turns import Turn, order_turns
from ftengine.dialect.tokens import TokenCodec
from ftengine.dialect.tools import Toolbox
from ftengine.errors import BadRequest

log = logging.getLogger("ftengine.dialect")


class ChatDialect:
    """See base.Dialect. Rendering and parsing keep no state between requests but encoded pieces of text."""

    def __init__(
        self,
        name: str,
        template: ChatTemplate,
        codec: TokenCodec,
        grammar: Grammar,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._template = template
        self._codec = codec
        self._grammar = grammar
        self._capabilities = probe(template)
        if not self._capabilities.tools:
            log.warning("the model's chat template knows no tools: tools in requests are left out of the prompt")
        elif not grammar.openings:
            log.warning("the form of this model's tool calls is not known: calls it writes stay text")

    def render(self, conversation: Conversation) -> Prompt:
        toolbox = Toolbox(conversation.tools)
        turns = adapt(order_turns(conversation, toolbox), self._capabilities)
        if not turns:
            raise BadRequest("no message has any content", param="messages")
        prefilled = prefill(self._grammar, conversation.tool_choice) if toolbox else ""
        thinking = False if prefilled else conversation.thinking
        rendered = self._render(turns, toolbox, thinking)
        in_reasoning = rendered.rstrip().endswith("<think>")
        if prefilled and in_reasoning:
            rendered = f"{rendered.rstrip()}\n\n</think>\n\n"
        text, tokens = self._codec.encode_rendered(rendered + prefilled)
        return Prompt(text, tokens, in_reasoning=in_reasoning and not prefilled, prefilled=prefilled)

    def _render(self, turns: list[Turn], toolbox: Toolbox, thinking: bool | None) -> str:
        variables: dict[str, Any] = {"add_generation_prompt": True, "documents": None, "tools": None}
        if self._capabilities.tools:
            variables["tools"] = self._codec.control.guard(toolbox.listed()) or None
        if thinking is not None:
            variables["enable_thinking"] = variables["thinking"] = thinking
        candidates = [turns] if any(turn.role == "user" for turn in turns) else [turns, with_user(turns)]
        reason = ""
        for candidate in candidates:
            try:
                messages = self._codec.control.guard(as_messages(candidate, self._capabilities))
                return self._template.render(messages, **variables)
            except TemplateRefused as refused:
                reason = reason or str(refused)
        raise BadRequest(f"the model's chat template refuses this conversation: {reason[:300]}", param="messages")

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text)

    def decoder(self) -> TokenDecoder:
        return self._codec.decoder()

    def parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser:
        calls = conversation.tool_choice.mode != "none"
        toolbox = Toolbox(conversation.tools if calls else ())
        return AnswerParser(self._grammar, toolbox, in_reasoning=prompt.in_reasoning, prefilled=prompt.prefilled)

    def token_text(self, token: int) -> str:
        return self._codec.token_text(token)
