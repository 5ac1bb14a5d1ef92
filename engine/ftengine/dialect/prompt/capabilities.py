"""What a chat template can render, found by rendering small conversations with it.

Templates differ in what they silently leave out and in what they refuse. Both are found once, when the dialect opens,
so that the way a conversation is rendered does not change from one request to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftengine.dialect.prompt.template import ChatTemplate, TemplateRefused

_ONE, _TWO, _TOOL = "Kestrel", "Marmot", "Weasel"


@dataclass(frozen=True)
class Capabilities:
    system: bool  # a leading system message
    tools: bool  # the list of tools
    tool_turns: bool  # calls in assistant messages and messages of role tool
    parallel_calls: bool  # several calls in one assistant message
    repeated_users: bool  # a user message after a user message
    reasoning_key: str  # under which a message's reasoning is read
    text_beside_reasoning: bool  # in a message with calls


def probe(template: ChatTemplate) -> Capabilities:
    user, answer = _message("user", "Hello"), _message("assistant", "Hello")
    reasoning_key = "reasoning_content"
    if not _shows_reasoning(template, reasoning_key) and _shows_reasoning(template, "thinking"):
        reasoning_key = "thinking"
    return Capabilities(
        system=_shows(template, [_message("system", _ONE), user], [_ONE]),
        tools=_shows(template, [user], [_TOOL], tools=[_definition(_TOOL)]),
        tool_turns=_shows(template, [user, _calls(_ONE), _result(_ONE, _TWO), answer, user], [_ONE, _TWO]),
        parallel_calls=_shows(
            template, [user, _calls(_ONE, _TWO), _result(_ONE, "1"), _result(_TWO, "2"), answer, user], [_ONE, _TWO]
        ),
        repeated_users=_shows(template, [_message("user", _ONE), _message("user", _TWO), answer, user], [_ONE, _TWO]),
        reasoning_key=reasoning_key,
        text_beside_reasoning=_shows(template, [user, _reasoned(reasoning_key, _TWO), _result(_TOOL, "1")], [_TWO]),
    )


def _shows_reasoning(template: ChatTemplate, key: str) -> bool:
    return _shows(template, [_message("user", "Hello"), _reasoned(key, ""), _result(_TOOL, "1")], [_ONE])


def _shows(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    wanted: list[str],
    tools: list[dict[str, Any]] | None = None,
) -> bool:
    try:
        rendered = template.render(messages, tools=tools, add_generation_prompt=True)
    except TemplateRefused:
        return False
    return all(word in rendered for word in wanted)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _calls(*names: str) -> dict[str, Any]:
    calls = [
        {"id": f"call{name}", "type": "function", "function": {"name": name, "arguments": {"path": "x"}}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _reasoned(key: str, text: str) -> dict[str, Any]:
    """A call in the last round, where templates that know reasoning keep it."""
    return {**_calls(_TOOL), key: _ONE, "content": text}


def _result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call{name}", "name": name}


def _definition(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "A file."}}}
    return {"type": "function", "function": {"name": name, "description": "Reads.", "parameters": parameters}}
