"""A dialect made of the checkpoint's own template and tokenizer, and a grammar for what it answers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftengine.conversation import Conversation, Event, ToolCallStart
from ftengine.dialect import answers_file
from ftengine.dialect.answer.parser import AnswerParser, Grammar
from ftengine.dialect.answer.prefill import prefill
from ftengine.dialect.assembly import Assembler
from ftengine.dialect.base import OutputParser, Prompt, TokenDecoder
from ftengine.dialect.generations import Generations
from ftengine.dialect.landmarks import find_landmarks
from ftengine.dialect.prompt.adapt import adapt, as_messages, with_user
from ftengine.dialect.prompt.capabilities import probe
from ftengine.dialect.prompt.template import ChatTemplate, TemplateRefused
from ftengine.dialect.prompt.turns import Turn, order_turns
from ftengine.dialect.recall import recall, written_turn
from ftengine.dialect.tokens import TokenCodec
from ftengine.dialect.tools import GuardedTools, Toolbox
from ftengine.dialect.unicode import well_formed
from ftengine.errors import BadRequest

log = logging.getLogger("ftengine.dialect")


class ChatDialect:
    """See base.Dialect. State between requests: encoded pieces of text, and answers that were given."""

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
        ends = [text for token in eos_token_ids if (text := codec.control_text(token)) is not None]
        self._landmarks = find_landmarks(template, codec.control, ends, self._capabilities.reasoning_key)
        marks = (codec.token_id(mark) for mark in self._landmarks.spoken)
        self.boundary_tokens = tuple(token for token in marks if token is not None)
        self._tools = GuardedTools(codec.control)
        self._assembler = Assembler(codec, self._landmarks)
        self._generations = Generations()
        self._identity = hashlib.sha256(codec.identity + template.source.encode("utf-8", "surrogatepass")).digest()
        if not self._capabilities.tools:
            log.warning("the model's chat template knows no tools: tools in requests are left out of the prompt")
        elif not grammar.openings:
            log.warning("the form of this model's tool calls is not known: calls it writes stay text")

    def render(self, conversation: Conversation) -> Prompt:
        toolbox = Toolbox(conversation.tools)
        ordered = order_turns(conversation, toolbox)
        answers = recall(ordered, self._generations)
        turns = adapt(ordered, self._capabilities)
        if not turns:
            raise BadRequest("no message has any content", param="messages")
        prefilled = prefill(self._grammar, conversation.tool_choice) if toolbox else ""
        thinking = False if prefilled else conversation.thinking
        rendered = self._render(turns, toolbox, thinking)
        in_reasoning = rendered.rstrip().endswith("<think>")
        if prefilled and in_reasoning:
            rendered = f"{rendered.rstrip()}\n\n</think>\n\n"
        history = [answers.get(id(turn)) for turn in turns if turn.role == "assistant"]
        prompt = self._assembler.assemble(well_formed(rendered + prefilled), history)
        return Prompt(
            "".join(prompt.texts),
            prompt.tokens.copy(),
            in_reasoning=in_reasoning and not prefilled,
            prefilled=prefilled,
            boundaries=prompt.boundaries(),
            turn_start=prompt.turn_start,
        )

    def _render(self, turns: list[Turn], toolbox: Toolbox, thinking: bool | None) -> str:
        variables: dict[str, Any] = {"add_generation_prompt": True, "documents": None, "tools": None}
        if self._capabilities.tools:
            variables["tools"] = self._tools.guarded(toolbox.listed()) or None
        if thinking is not None:
            variables["enable_thinking"] = variables["thinking"] = thinking
        candidates = [turns] if any(turn.role == "user" for turn in turns) else [turns, with_user(turns)]
        reason = ""
        for candidate in candidates:
            try:
                messages = as_messages(candidate, self._capabilities, self._codec.control)
                return self._template.render(messages, **variables)
            except TemplateRefused as refused:
                reason = reason or str(refused)
        raise BadRequest(f"the model's chat template refuses this conversation: {reason[:300]}", param="messages")

    def remember(
        self, conversation: Conversation, prompt: Prompt, tokens: Sequence[int], events: Sequence[Event]
    ) -> None:
        if prompt.turn_start < 0 or not tokens:
            return
        try:
            self._remember(conversation, prompt, tokens, events)
        except Exception:  # whatever a model wrote: the next prompt is only slower without it
            log.warning("an answer could not be kept for the next prompt", exc_info=True)

    def _remember(
        self, conversation: Conversation, prompt: Prompt, tokens: Sequence[int], events: Sequence[Event]
    ) -> None:
        last = self._codec.control_text(tokens[-1])
        stop = last if tokens[-1] in self.eos_token_ids or last in self._landmarks.turn_starts else None
        decoder, parser = self._codec.decoder(), self.parser(conversation, prompt)
        meant = parser.feed(decoder.feed(tokens[:-1] if stop else tokens) + decoder.finish()) + parser.finish()
        answer = written_turn(
            self._codec,
            conversation,
            [*prompt.tokens[prompt.turn_start :], *tokens],
            meant,
            [event.id for event in events if isinstance(event, ToolCallStart)],
            self._generations,
            stop=stop or "",
            think_end=self._landmarks.think_end,
            call_end=self._landmarks.call_end,
        )
        if answer is not None:
            self._generations.add(answer)

    def save_answers(self, path: Path) -> None:
        answers_file.save(self._generations, path, self._identity)

    def load_answers(self, path: Path) -> None:
        answers_file.load(self._generations, path, self._identity, self.vocab_size)

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
