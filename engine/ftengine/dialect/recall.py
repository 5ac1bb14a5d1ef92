"""Answers into memory when they are given, and out of it when a client sends them back."""

from __future__ import annotations

import array
import json
from collections.abc import Sequence
from functools import partial

from ftengine.conversation import (
    Conversation,
    Event,
    Message,
    Part,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
)
from ftengine.dialect.contexts import Contexts
from ftengine.dialect.generations import CallWritten, Control, Generated, Generations
from ftengine.dialect.prompt.turns import Turn, bare, order_turns
from ftengine.dialect.tokens import TokenCodec
from ftengine.dialect.tools import Toolbox


def recall(turns: Sequence[Turn], generations: Generations) -> dict[int, Generated]:
    """Assistant turns that the model wrote, by identity. Their values become those that were written, in its order."""
    found: dict[int, Generated] = {}
    contexts = Contexts(turns)
    for at, turn in enumerate(turns):
        answer = generations.find(turn, partial(contexts.place, at)) if turn.role == "assistant" else None
        if answer is None:
            continue
        found[id(turn)] = answer
        turn.text = answer.text_as_in(turn) or ""
        turn.reasoning = answer.reasoning
        for call, written in zip(turn.calls, answer.calls, strict=True):
            call.arguments = written.arguments
    return found


def written_turn(
    codec: TokenCodec,
    conversation: Conversation,
    turn: Sequence[int],
    events: Sequence[Event],
    ids: Sequence[str],
    generations: Generations,
    *,
    stop: str,
    think_end: str,
    call_end: str,
) -> Generated | None:
    """What an answer is remembered as. `turn`: its tokens with those of the prompt from the turn's beginning on.

    events: what the answer's tokens mean. ids: that its calls got, in order. generations: answers
    that the conversation before it may hold. None: there is nothing to know it by.
    """
    toolbox = Toolbox(conversation.tools)
    said, parts = _parts(events, ids)
    turns = order_turns(Conversation((Message("assistant", parts),), conversation.tools), toolbox)
    if not turns or not (said or turns[0].calls):
        return None
    text, controls = _controls(codec, turn)
    if stop:
        controls.pop()
    elif turns[0].calls and controls[-1].content != call_end:
        return None  # cut inside a call: the template shows it whole
    ended = next((index for index, control in enumerate(controls) if control.content == think_end), -1)
    history = order_turns(conversation, toolbox)
    recall(history, generations)  # its context is told from the values that the next prompt's is
    return Generated(
        tokens=array.array("i", turn).tobytes(),
        text=text,
        controls=tuple(controls[1:]),
        think_end=ended - 1 if ended > 0 else -1,
        stop=stop,
        reasoning=turns[0].reasoning,
        said=said if len(said) > 1 else (turns[0].text,),
        calls=tuple(CallWritten(bare(call.id), call.name, call.arguments) for call in turns[0].calls),
        context=Contexts(history).before(len(history)),
    )


def _parts(events: Sequence[Event], ids: Sequence[str]) -> tuple[tuple[str, ...], tuple[Part, ...]]:
    """Visible texts, and all of the answer as the parts of a message."""
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
    texts: list[str] = []
    names: list[str] = []
    joined = False
    for event in events:
        if isinstance(event, TextDelta):
            texts.append((texts.pop() if joined else "") + event.text)
            joined = True
        elif isinstance(event, ToolCallStart):
            names.append(event.name)
            joined = False
        elif isinstance(event, ToolCallEnd):
            call_id = ids[event.index] if event.index < len(ids) else ""
            parts.append(ToolCall(call_id, names[event.index], json.loads(event.arguments)))
    parts[1 if reasoning else 0 : 0] = map(Text, texts)
    return tuple(texts), tuple(parts)


def _controls(codec: TokenCodec, turn: Sequence[int]) -> tuple[str, list[Control]]:
    """The turn's text and the control tokens in it, the opening one first."""
    texts: list[str] = []
    controls: list[Control] = []
    characters = begin = 0
    for at, token in enumerate(turn):
        content = codec.control_text(token)
        if content is None:
            continue
        before = codec.spelled(turn[begin:at])
        characters += len(before)
        controls.append(Control(at, characters, content))
        texts += (before, content)
        characters += len(content)
        begin = at + 1
    texts.append(codec.spelled(turn[begin:]))
    return "".join(texts), controls
