"""Chat Completions: the JSON of a request to the neutral conversation."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from ftengine.api.body import check_depth
from ftengine.api.sampling import Count, SamplingFields, TopCount
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
    ToolResult,
    ToolSpec,
)
from ftengine.errors import BadRequest

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class FunctionIn(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomIn(Struct, frozen=True):
    name: str
    input: str = ""


class ToolCallIn(Struct, frozen=True):
    id: str | None = None
    type: str | None = None
    function: FunctionIn | None = None
    custom: CustomIn | None = None


class MessageIn(Struct, frozen=True):
    role: Annotated[str, Meta(extra_json_schema={"enum": list(_ROLES)})]
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: Any = None


class ToolIn(Struct, frozen=True):
    type: str | None = None
    function: FunctionSpec | None = None
    custom: FunctionSpec | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class ChatRequest(SamplingFields, kw_only=True, frozen=True):
    messages: list[MessageIn]
    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[ToolIn] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: Any = None  # read by sessions.openai_caller, of any type, as is the next
    user: Any = None


def conversation(body: ChatRequest, limits: Limits, notes: Notes) -> Conversation:
    """Raises BadRequest."""
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        notes.add(f"response_format {str(kind)[:40]} is accepted and not enforced")
    return Conversation(
        messages=tuple(
            _message(message, f"messages[{index}]", limits, notes) for index, message in enumerate(body.messages)
        ),
        tools=_tools(body.tools or (), limits, notes),
        tool_choice=_choice(body.tool_choice),
        thinking=_thinking(body),
    )


def _message(message: MessageIn, where: str, limits: Limits, notes: Notes) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise BadRequest(f"{where}.role: expected one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = _content(message.content, f"{where}.content", notes)
    if role == "tool":
        return Message("tool", (ToolResult(message.tool_call_id or "", content),))
    parts: list[Part] = []
    if role == "assistant" and message.reasoning_content:
        parts.append(Reasoning(message.reasoning_content))
    parts += content
    for index, call in enumerate(message.tool_calls or ()):
        parts.append(_call(call, f"{where}.tool_calls[{index}]", limits))
    return Message(role, tuple(parts))


def _content(content: str | list[Any] | None, where: str, notes: Notes) -> tuple[Text | Image, ...]:
    if content is None or isinstance(content, str):
        return (Text(content),) if content else ()
    return tuple(_block(block, f"{where}[{index}]", notes) for index, block in enumerate(content))


def _block(block: Any, where: str, notes: Notes) -> Text | Image:
    kind = block_type(block, where)
    if kind == "text":
        return Text(text_field(block, "text", where))
    if kind == "refusal":
        return Text(text_field(block, "refusal", where))
    return placeholder(kind.removesuffix("_url"), notes)


def _call(call: ToolCallIn, where: str, limits: Limits) -> ToolCall:
    identity = call.id or ""
    if call.custom is not None:
        return ToolCall(identity, call.custom.name, {"input": call.custom.input})
    if call.function is None:
        raise BadRequest(f"{where}.function: required", param=f"{where}.function")
    arguments = call.function.arguments
    check_depth(arguments, f"{where}.function.arguments", limits)
    return ToolCall(identity, call.function.name, "{}" if arguments is None else arguments)


def _tools(tools: list[ToolIn] | tuple[ToolIn, ...], limits: Limits, notes: Notes) -> tuple[ToolSpec, ...]:
    specs = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        given, kind = (tool.custom, "custom") if tool.type == "custom" else (tool.function, "function")
        if tool.type not in (None, "function", "custom"):
            notes.add(f"the tool type {tool.type[:40]} is not served and was left out")
            continue
        if given is None:
            raise BadRequest(f"{where}.{kind}: required", param=f"{where}.{kind}")
        specs.append(
            ToolSpec(
                name=tool_name(given.name, f"{where}.{kind}.name"),
                description=given.description or "",
                parameters=schema_field(given.parameters, f"{where}.{kind}.parameters", limits),
                freeform=kind == "custom",
            )
        )
    return tuple(specs)


def _choice(choice: str | dict[str, Any] | None) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice in ("none", "required"):
        return ToolChoice("none" if choice == "none" else "required")
    if isinstance(choice, dict):
        kind = choice.get("type")
        inner = choice.get(kind) if isinstance(kind, str) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if kind in ("function", "custom") and isinstance(name, str) and name:
            return ToolChoice("named", name)
        if kind == "allowed_tools" and isinstance(inner, dict):
            return ToolChoice("required" if inner.get("mode") == "required" else "auto")
    raise BadRequest("tool_choice: expected auto, none, required or a named function", param="tool_choice")


def _thinking(body: ChatRequest) -> bool | None:
    """`chat_template_kwargs.enable_thinking` as other local servers take it, else reasoning_effort."""
    wanted = (body.chat_template_kwargs or {}).get("enable_thinking")
    if isinstance(wanted, bool):
        return wanted
    if body.reasoning_effort is None:
        return None
    return body.reasoning_effort != "none"
