"""One streamed request and when its pieces came.

While a stream runs, lines are only kept with the time at which they came; they are read as JSON when it is over, so
that measuring takes as little as can be from a machine that computes on its CPU.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ftengine.errors import FtError
from ftlaunch.servers.ask import error_message

if TYPE_CHECKING:
    from pathlib import Path

SILENCE = 600.0  # seconds without a byte: ft sends a sign of life every 8, others may be silent for a whole prompt
ASK_SECONDS = 10.0
MOST_LINE, MOST_STREAM, MOST_BODY = 8 << 20, 256 << 20, 8 << 20


@dataclass(frozen=True)
class Target:
    """A server that answers OpenAI's Completions and Chat Completions."""

    url: str  # without /v1
    model: str  # its id there
    api_key: str | None = None
    log: Path | None = None  # of a server that was started for this

    @property
    def help(self) -> str:
        return f"see its log: {self.log}" if self.log is not None else "ft ps, and look at the server's log"

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


@dataclass(frozen=True)
class Reply:
    """Times in seconds since the request was sent."""

    first: float  # the first piece of text, reasoning or a call; without any, the end
    last: float  # the piece that says why it ended, else the last one
    arrivals: tuple[float, ...]  # of the pieces
    prompt_tokens: int
    cached_tokens: int | None  # of the prompt, not computed again; None: the server does not tell
    output_tokens: int
    finish: str | None = None
    message: dict[str, Any] = field(default_factory=dict)  # of a chat: what was said, to be sent back

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: those after the first, by the time since it. None for fewer than two."""
        seconds = self.last - self.first
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds > 0 else None


def stream(target: Target, path: str, body: dict[str, Any]) -> Reply:
    """`POST path` with `body`, to its end. Raises FtError when the server refuses, breaks off or falls silent."""
    wanted = {**body, "model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    connection = _connection(target, SILENCE)
    try:
        began = time.perf_counter()
        connection.request("POST", path, json.dumps(wanted), target.headers)
        with connection.getresponse() as response:
            if response.status != 200:
                said = error_message(response.read(MOST_BODY))
                raise FtError(said or f"{target.url}{path} answered {response.status}", target.help)
            lines = _lines(response)
    except TimeoutError as error:
        raise FtError(f"the server at {target.url} was silent for {SILENCE:.0f} s", target.help) from error
    except (OSError, http.client.HTTPException) as error:
        raise FtError(f"the server at {target.url} does not answer or broke off ({error})", target.help) from error
    finally:
        connection.close()
    try:
        return _reply(target, [(at - began, line) for at, line in lines])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FtError(f"what {target.url}{path} streams is not OpenAI's form ({error!r})", target.help) from error


def streams(target: Target, path: str, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
    """The same of several requests at once. Raises the first one's error."""
    if len(bodies) == 1:
        return [stream(target, path, bodies[0])]
    replies: list[Reply | Exception | None] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            replies[number] = stream(target, path, bodies[number])
        except Exception as error:
            replies[number] = error

    # Daemons: a Ctrl-C ends the command, whatever they wait for.
    threads = [threading.Thread(target=run, args=[number], daemon=True) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return [reply for reply in replies if isinstance(reply, Reply)]


def get(target: Target, path: str) -> dict[str, Any]:
    """The JSON object at `path`; empty when there is none."""
    try:
        return ask(target, path)[1]
    except FtError:
        return {}


def ask(target: Target, path: str) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the JSON object at `path`, empty when there is none. Raises FtError where nothing answers."""
    connection = _connection(target, ASK_SECONDS)
    try:
        connection.request("GET", path, headers=target.headers)
        with connection.getresponse() as response:
            status, text = response.status, response.read(MOST_BODY)
    except (OSError, http.client.HTTPException) as error:
        raise FtError(f"nothing answers at {target.url} ({error})", "ft ps, and look at the address") from error
    finally:
        connection.close()
    try:
        body = json.loads(text) if status == 200 else None
    except (ValueError, RecursionError):
        body = None
    return status, body if isinstance(body, dict) else {}


def _connection(target: Target, timeout: float) -> http.client.HTTPConnection:
    """Never through a proxy: http.client knows none."""
    parts = urlsplit(target.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout)


def _lines(response: http.client.HTTPResponse) -> list[tuple[float, bytes]]:
    lines, size = [], 0
    while line := response.readline(MOST_LINE):
        if line.startswith(b"data:"):
            lines.append((time.perf_counter(), line))
        size += len(line)
        if size > MOST_STREAM:
            raise http.client.HTTPException(f"more than {MOST_STREAM >> 20} MiB")
    return lines


def _reply(target: Target, lines: Sequence[tuple[float, bytes]]) -> Reply:
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    said = _Said()
    finish, last = None, lines[-1][0]
    for at, line in lines:
        text = line[5:].strip()
        if text == b"[DONE]":
            break
        event = json.loads(text)
        if event.get("error"):
            raise FtError(str(event["error"].get("message") or "the server broke off"), target.help)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if said.take(choice):
                arrivals.append(at)
            if choice.get("finish_reason"):
                finish, last = choice["finish_reason"], at
    if finish is None:
        raise FtError("the server ended a stream before its answer was complete", target.help)
    return Reply(
        first=arrivals[0] if arrivals else last,
        last=last,
        arrivals=tuple(arrivals),
        prompt_tokens=int(usage["prompt_tokens"]),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        output_tokens=int(usage["completion_tokens"]),
        finish=finish,
        message=said.message(),
    )


class _Said:
    """An answer put together again."""

    def __init__(self) -> None:
        self._texts = {"content": "", "reasoning_content": ""}
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, choice: dict[str, Any]) -> bool:
        """Whether anything is in it."""
        delta = choice.get("delta") or {"content": choice.get("text")}
        found = False
        for name in self._texts:
            if piece := delta.get(name):
                self._texts[name] += piece
                found = True
        for part in delta.get("tool_calls") or ():
            found = True
            empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = self._calls.setdefault(part["index"], empty)
            call["id"] += part.get("id") or ""
            for name, piece in (part.get("function") or {}).items():
                call["function"][name] += piece or ""
        return found

    def message(self) -> dict[str, Any]:
        texts = {name: text for name, text in self._texts.items() if text}
        calls = {"tool_calls": list(self._calls.values())} if self._calls else {}
        return {"role": "assistant", "content": "", **texts, **calls}
