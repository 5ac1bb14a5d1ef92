"""Responses: the JSON of a request to the neutral conversation.

Nothing is stored: a request must bring its whole history, as Codex does.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ftengine.api.responses.items import Items
from ftengine.api.responses.tools import Tools, flat_name
from ftengine.api.sampling import Count, SamplingFields
from ftengine.api.settings import Limits
from ftengine.api.translate import Notes
from ftengine.conversation import Conversation, Message, Text, ToolChoice
from ftengine.errors import BadRequest


class ReasoningIn(Struct, frozen=True):
    effort: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True, frozen=True):
    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | list[Any] | None = None
    max_output_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningIn | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt_cache_key: Any = None  # read by sessions.openai_caller, of any type, as is the next
    user: Any = None


def input_items(body: ResponsesRequest) -> list[Any]:
    """A plain string is one user message. Raises BadRequest."""
    for name, given in (
        ("previous_response_id", body.previous_response_id),
        ("conversation", body.conversation),
        ("background", body.background),
    ):
        if given:
            raise BadRequest(f"{name}: responses are not stored here; send the whole input each time", param=name)
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}] if body.input else []
    return body.input or []


def conversation(body: ResponsesRequest, items: list[Any], limits: Limits, notes: Notes) -> tuple[Conversation, Tools]:
    """Raises BadRequest or TooLarge."""
    form = (body.text or {}).get("format")
    kind = form.get("type", "text") if isinstance(form, dict) else "text"
    if kind != "text":
        notes.add(f"text.format {str(kind)[:40]} is accepted and not enforced")
    tools = Tools(limits, notes)
    tools.add(body.tools or [], "tools")
    reader = Items(tools, limits, notes)
    for index, item in enumerate(items):
        reader.add(item, f"input[{index}]")
    messages = (*_instructions(body.instructions, limits, notes), *reader.messages())
    if not messages:
        raise BadRequest("input: holds nothing to answer", param="input")
    effort = body.reasoning.effort if body.reasoning else None
    source = Conversation(
        messages=messages,
        tools=tools.specs,
        tool_choice=_choice(body.tool_choice, notes),
        thinking=False if effort == "none" else None,
    )
    return source, tools


def _instructions(given: str | list[Any] | None, limits: Limits, notes: Notes) -> tuple[Message, ...]:
    if isinstance(given, str):
        return (Message("system", (Text(given),)),) if given else ()
    reader = Items(Tools(limits, notes), limits, notes)
    for index, item in enumerate(given or ()):
        reader.add(item, f"instructions[{index}]")
    return reader.messages()


def _choice(choice: str | dict[str, Any] | None, notes: Notes) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice in ("none", "required"):
        return ToolChoice("none" if choice == "none" else "required")
    if isinstance(choice, dict) and isinstance(kind := choice.get("type"), str):
        name, space = choice.get("name"), choice.get("namespace")
        if kind in ("function", "custom"):
            if isinstance(name, str) and name:
                return ToolChoice("named", flat_name(name, space if isinstance(space, str) else None))
        elif kind == "allowed_tools":
            return ToolChoice("required" if choice.get("mode") == "required" else "auto")
        else:
            notes.add(f"tool_choice {kind[:40]} is not served and counts as auto")
            return ToolChoice()
    raise BadRequest("tool_choice: expected auto, none, required or a named function", param="tool_choice")
