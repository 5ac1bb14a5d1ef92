"""What the recorded agents and the server that they spoke to said to each other: requests, and what they were answered.

The requests of one recording are one session of a client, in the order they were sent.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "shared"
TRACES = SHARED / "traces"
ROUTES = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
ID_FIELDS = frozenset({"id", "call_id", "tool_use_id", "tool_call_id"})

Events = Iterable[tuple[str | None, Any]]  # of a stream: name and data


@dataclass(frozen=True)
class Call:
    """arguments: the text that was sent. Not JSON where the answer broke off, or of a freeform tool."""

    id: str
    name: str
    arguments: str
    freeform: bool = False

    @property
    def values(self) -> dict[str, Any] | None:
        """None: the text is no JSON object."""
        try:
            value = json.loads(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Turn:
    """An assistant's turn as it went over the wire. whole: it came to its end."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Exchange:
    name: str  # client/scenario/number
    route: str
    path: str  # with its query
    headers: dict[str, str]
    body: dict[str, Any]
    turn: Turn | None  # None: the recording server refused

    @property
    def side(self) -> bool:
        return not self.body.get("tools")

    @property
    def length(self) -> int:
        """Messages or items of its history."""
        return len(self.body.get("messages") or self.body.get("input") or ())


def scenarios() -> list[str]:
    """`client/scenario` of each recording with a request to a model; none where there are no traces."""
    return [str(folder.relative_to(TRACES)) for folder in sorted(TRACES.glob("*/*")) if folder.is_dir()]


# The recordings' paths were renamed, but not where a path lay in two events of a stream.
RENAMED = ("/home/dev/", "/home/user/")


def exchanges(scenario: str) -> list[Exchange]:
    found = (_read(path) for path in sorted((TRACES / scenario).glob("*.json*")))
    return [exchange for exchange in found if exchange.route in ROUTES]


def _read(path: Path) -> Exchange:
    raw = path.read_bytes()
    form = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    stream = (form.get("response") or {}).get("sse")
    return Exchange(
        name=str(path.relative_to(TRACES)).split(".json")[0],
        route=form["path"],
        path=form["path"] + (f"?{form['query']}" if form["query"] else ""),
        headers=form["headers"],
        body=form["body"] or {},
        turn=_renamed(turn_of(form["path"], [tuple(event) for event in stream])) if stream else None,
    )


def _renamed(turn: Turn) -> Turn:
    calls = tuple(replace(call, arguments=call.arguments.replace(*RENAMED)) for call in turn.calls)
    return replace(turn, text=turn.text.replace(*RENAMED), calls=calls)


def turn_of(route: str, events: Events) -> Turn:
    """A stream's events put together."""
    return {"/v1/messages": _messages, "/v1/responses": _responses, "/v1/chat/completions": _chat}[route](events)


def _messages(events: Events) -> Turn:
    text = reasoning = ""
    calls: dict[int, list[str]] = {}
    whole = False
    for _, data in events:
        whole = whole or data["type"] == "message_stop"
        if data["type"] == "content_block_start" and data["content_block"]["type"] == "tool_use":
            calls[data["index"]] = [data["content_block"]["id"], data["content_block"]["name"], ""]
        elif data["type"] == "content_block_delta":
            delta = data["delta"]
            text += delta.get("text", "")
            reasoning += delta.get("thinking", "")
            if "partial_json" in delta:
                calls[data["index"]][2] += delta["partial_json"]
    return Turn(text, reasoning, tuple(Call(*call) for call in calls.values()), whole)


def _responses(events: Events) -> Turn:
    text = reasoning = ""
    calls: list[Call] = []
    whole = False
    for _, data in events:
        whole = whole or data["type"] == "response.completed"
        if data["type"] != "response.output_item.done":
            continue
        item = data["item"]
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or ())
        elif item["type"] == "custom_tool_call":
            calls.append(Call(item["call_id"], item["name"], item["input"], freeform=True))
        else:
            calls.append(Call(item["call_id"], item["name"], item["arguments"]))
    return Turn(text, reasoning, tuple(calls), whole)


def _chat(events: Events) -> Turn:
    text = reasoning = ""
    calls: dict[int, list[str]] = {}
    whole = False
    for _, data in events:
        if not isinstance(data, dict):  # [DONE]
            continue
        for choice in data.get("choices") or ():
            whole = whole or bool(choice.get("finish_reason"))
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece["index"], ["", "", ""])
                function = piece.get("function") or {}
                call[0] = piece.get("id") or call[0]
                call[1] = function.get("name") or call[1]
                call[2] += function.get("arguments") or ""
    return Turn(text, reasoning, tuple(Call(*call) for call in calls.values()), whole)


def with_ids(value: Any, ids: dict[str, str]) -> Any:
    """A request's body with the call ids that this server gave in place of the recorded ones. ids: recorded to given.

    A client that strips characters from an id does so to ours, too.
    """
    bare_ids = {bare(recorded): given for recorded, given in ids.items()}

    def renamed(name: str, item: Any) -> Any:
        if name not in ID_FIELDS or not isinstance(item, str) or bare(item) not in bare_ids:
            return walk(item)
        return ids[item] if item in ids else bare(bare_ids[bare(item)])

    def walk(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: renamed(name, inner) for name, inner in item.items()}
        return [walk(inner) for inner in item] if isinstance(item, list) else item

    return walk(value)


def bare(call_id: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "", call_id)
