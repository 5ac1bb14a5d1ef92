"""Anthropic Messages: the JSON of a request to the neutral conversation.

Lenient where Claude Code needs it: system messages anywhere, deferred tools, tool references, unknown fields, block
types and betas. Strict about the types of the fields that it reads.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from ftengine.api.body import check_depth
from ftengine.api.generate import Job
from ftengine.api.sampling import Count, SamplingFields
from ftengine.api.sessions import ATTRIBUTION, Caller
from ftengine.api.settings import Limits
from ftengine.api.translate import Notes, block_type, placeholder, schema_field, text_field, tool_name
from ftengine.conversation import (
    Conversation,
    Image,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
    ToolSpec,
)
from ftengine.errors import BadRequest

_ROLES = ("user", "assistant", "system")


class MessageIn(Struct, frozen=True):
    role: Annotated[str, Meta(extra_json_schema={"enum": list(_ROLES)})]
    content: str | list[Any] | None = None


class ToolIn(Struct, frozen=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Any = None
    defer_loading: bool | None = None


class ToolChoiceIn(Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingIn(Struct, frozen=True):
    type: str


class MessagesRequest(SamplingFields, kw_only=True, frozen=True):
    messages: list[MessageIn]
    model: str | None = None
    max_tokens: Count | None = None
    system: str | list[Any] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoiceIn | None = None
    thinking: ThinkingIn | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Any = None  # read by sessions.claude_caller, of any type


def job(body: MessagesRequest, caller: Caller, stops: tuple[str, ...], limits: Limits, notes: Notes) -> Job:
    """Raises BadRequest."""
    choice = body.tool_choice
    return Job(
        source=conversation(body, limits, notes),
        sampling=body,
        caller=caller,
        max_tokens=body.max_tokens,
        stops=stops,
        one_call=bool(choice and choice.disable_parallel_tool_use),
    )


def conversation(body: MessagesRequest, limits: Limits, notes: Notes) -> Conversation:
    """Raises BadRequest."""
    messages: list[Message] = []
    system = _blocks(body.system, "system", notes)
    # The attribution may change with each request and would spoil the prompt cache.
    kept = tuple(part for part in system if not (isinstance(part, Text) and part.text.startswith(ATTRIBUTION)))
    if kept:
        messages.append(Message("system", kept))
    for index, message in enumerate(body.messages):
        messages += _message(message, f"messages[{index}]", limits, notes)
    return Conversation(
        messages=tuple(messages),
        tools=_tools(body.tools or (), limits, notes),
        tool_choice=_choice(body.tool_choice),
        thinking=_thinking(body.thinking),
    )


def _message(message: MessageIn, where: str, limits: Limits, notes: Notes) -> list[Message]:
    where = f"{where}.content"
    if message.role == "assistant":
        return [Message("assistant", tuple(_assistant(message.content, where, limits, notes)))]
    if message.role == "system":
        return [Message("system", tuple(_blocks(message.content, where, notes)))]
    if message.role != "user":
        place = where.replace(".content", ".role")
        raise BadRequest(f"{place}: expected one of {', '.join(_ROLES)}", param=place)
    return _user(message.content, where, notes)


def _user(content: str | list[Any] | None, where: str, notes: Notes) -> list[Message]:
    """Tool results become messages of their own, in their order among the other blocks."""
    messages: list[Message] = []
    parts: list[Part] = []

    def flush(role: Role = "user") -> None:
        if parts:
            messages.append(Message(role, tuple(parts)))
            parts.clear()

    for index, block in enumerate(_listed(content)):
        place = f"{where}[{index}]"
        if block_type(block, place) == "tool_result":
            flush()
            parts.append(_tool_result(block, place, notes))
            flush("tool")
        else:
            parts.append(_block(block, place, notes))
    if not messages and not parts:
        parts.append(Text(""))
    flush()
    return messages


def _assistant(content: str | list[Any] | None, where: str, limits: Limits, notes: Notes) -> list[Part]:
    parts: list[Part] = []
    for index, block in enumerate(_listed(content)):
        place = f"{where}[{index}]"
        kind = block_type(block, place)
        if kind == "thinking":
            parts.append(Reasoning(text_field(block, "thinking", place)))
        elif kind == "redacted_thinking":
            continue  # nothing in it can be read here
        elif kind == "tool_use":
            parts.append(_tool_use(block, place, limits))
        else:
            parts.append(_block(block, place, notes))
    return parts


def _tool_use(block: dict[str, Any], where: str, limits: Limits) -> ToolCall:
    given = block.get("input", {})
    check_depth(given, f"{where}.input", limits)
    name, call_id = text_field(block, "name", where), text_field(block, "id", where)
    if not isinstance(given, dict):
        return ToolCall(call_id, name, given if isinstance(given, str) else {})
    unparsed = given.get("__unparsedToolInput")
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        return ToolCall(call_id, name, unparsed["raw"])  # what the model wrote and Claude Code could not read
    return ToolCall(call_id, name, given)


def _tool_result(block: dict[str, Any], where: str, notes: Notes) -> ToolResult:
    content: list[Text | Image | ToolReference] = []
    given = block.get("content")
    if given is not None and not isinstance(given, (str, list)):
        raise BadRequest(f"{where}.content: expected a string or an array", param=f"{where}.content")
    for index, inner in enumerate(_listed(given)):
        place = f"{where}.content[{index}]"
        if block_type(inner, place) == "tool_reference":
            content.append(ToolReference(text_field(inner, "tool_name", place)))
        else:
            content.append(_block(inner, place, notes))
    return ToolResult(text_field(block, "tool_use_id", where), tuple(content), block.get("is_error") is True)


def _blocks(content: str | list[Any] | None, where: str, notes: Notes) -> list[Text | Image]:
    return [_block(block, f"{where}[{index}]", notes) for index, block in enumerate(_listed(content))]


def _block(block: Any, where: str, notes: Notes) -> Text | Image:
    """`cache_control` and other companions of the text are passed over."""
    kind = block_type(block, where)
    if kind == "text":
        return Text(text_field(block, "text", where))
    return placeholder(kind, notes)


def _listed(content: str | list[Any] | None) -> list[Any]:
    """A plain string and a single text block are one and the same: clients switch between them."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or []


def _tools(tools: list[ToolIn] | tuple[ToolIn, ...], limits: Limits, notes: Notes) -> tuple[ToolSpec, ...]:
    specs = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            notes.add(f"the tool type {tool.type[:40]} is not served and was left out")
            continue
        specs.append(
            ToolSpec(
                name=tool_name(tool.name, f"{where}.name"),
                description=tool.description or "",
                parameters=schema_field(tool.input_schema, f"{where}.input_schema", limits),
                deferred=bool(tool.defer_loading),
            )
        )
    return tuple(specs)


def _choice(choice: ToolChoiceIn | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.type == "tool" and choice.name:
        return ToolChoice("named", choice.name)
    raise BadRequest("tool_choice: expected auto, any, none, or tool with a name", param="tool_choice")


def _thinking(thinking: ThinkingIn | None) -> bool | None:
    """Adaptive leaves it to the dialect; a request that does not mention thinking gets none, as with Anthropic."""
    if thinking is None or thinking.type == "disabled":
        return False
    return True if thinking.type == "enabled" else None
