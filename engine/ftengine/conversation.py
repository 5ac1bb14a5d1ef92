"""The neutral form behind all APIs: a conversation goes in, events come out.

Every API module translates its own JSON into `Conversation` and the `Event`s back into its own JSON; dialects
render the one and produce the other. Knows nothing of HTTP, tokens or any one API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Image:
    """An image or document the model cannot see: rendered as a text placeholder; `label` says what it was."""

    label: str = "image"


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call the assistant made. `arguments` is the JSON text or the object, as the client sent it.

    It may be malformed text: a dialect must render something for it and never raise.
    A freeform (custom) tool's call has arguments {"input": text}.
    """

    id: str
    name: str
    arguments: str | dict[str, Any]


@dataclass(frozen=True)
class ToolReference:
    """Inside a tool result: the named deferred tool becomes known to the model here (Claude's tool search)."""

    name: str


@dataclass(frozen=True)
class ToolResult:
    call_id: str
    content: tuple[Text | Image | ToolReference, ...]
    is_error: bool = False


Part = Text | Image | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ToolSpec:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of the arguments object
    freeform: bool = False  # one text argument named "input" (Responses' `custom` tools)
    deferred: bool = False  # rendered where a ToolReference names it, not at the top


@dataclass(frozen=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool | None = None  # None: the dialect's default


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """`index` counts the calls of this answer from 0. The id is made by the dialect: "call_" + 24 alphanumerics."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A fragment of the arguments' JSON text; all fragments of one index joined are one valid JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True)
class ToolCallEnd:
    index: int
    arguments: str  # the complete JSON text, equal to the joined fragments


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
