"""A coding agent's loop: a conversation that grows by what the model says and by results of tools.

The results are scripted, in lengths that a coding agent sees; the calls are the model's own where it makes any, else
scripted too, so that a model that calls nothing is measured by the same lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftlaunch.bench.client import Reply, Target, stream
from ftlaunch.bench.place import Show
from ftlaunch.bench.prefill import prompt_samples
from ftlaunch.bench.prompts import Prompts, opening
from ftlaunch.bench.report import Point
from ftlaunch.bench.room import check_room

PATH = "/v1/chat/completions"
TOOLS = (  # name, description, the one argument
    ("list", "Lists the files of a folder.", "path"),
    ("read", "Reads a file.", "path"),
    ("search", "Searches all files for a pattern.", "pattern"),
    ("run", "Runs a command.", "command"),
)
TASK = "One of the tests in this repository fails. Find out why, and mend it. Use the tools, one call at a time."


@dataclass(frozen=True)
class Agent:
    prefix: int = 2000  # tokens of the system prompt
    results: tuple[int, ...] = (300, 16, 64, 128, 300, 16, 64, 128)  # tokens of the tools' results, in order
    output: int = 64  # most tokens that the model says in a step
    runs: int = 3  # conversations
    warmup: int = 1


def measure(target: Target, settings: Agent, show: Show) -> list[Point]:
    """A point for each step: the first, one for each result, and the last request once more. Raises FtError."""
    _check_room(target, settings)
    prompts = Prompts.of(target, "code")
    labels = ["first", *(f"+{tokens}" for tokens in settings.results), "again"]
    points = [Point({"step": step, "what": label}, [{}]) for step, label in enumerate(labels)]
    runs = settings.warmup + settings.runs
    for run in range(runs):
        show("agent's conversations", run / runs)
        for point, reply in zip(points, _conversation(target, settings, prompts, run), strict=True):
            if run >= settings.warmup:
                for name, value in prompt_samples(reply).items():
                    point.turns[0].setdefault(name, []).append(value)
    show("agent's conversations", 1.0)
    return points


def _conversation(target: Target, settings: Agent, prompts: Prompts, run: int) -> list[Reply]:
    system = opening() + prompts.text(settings.prefix, f"system {run}")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": TASK}]
    body = {"tools": _tools(), "max_tokens": settings.output, "temperature": 0}

    def ask() -> Reply:
        return stream(target, PATH, {**body, "messages": messages})

    replies = [ask()]
    for step, tokens in enumerate(settings.results):
        messages += _answered(replies[-1], step, prompts.text(tokens, f"result {run} {step}"))
        replies.append(ask())
    return [*replies, ask()]


def _tools() -> list[dict[str, Any]]:
    """Many templates write the tools before the system prompt, so the first one begins with the new opening, too."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{opening()}{description}" if number == 0 else description,
                "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
            },
        }
        for number, (name, description, key) in enumerate(TOOLS)
    ]


def _answered(reply: Reply, step: int, result: str) -> list[dict[str, Any]]:
    """The model's turn, and the results of its calls. One that was cut off is replaced by a scripted call."""
    said = dict(reply.message)
    if reply.finish != "tool_calls" or not said.get("tool_calls"):
        arguments = f'{{"path": "src/part_{step}.py"}}'
        call = {"id": f"call_{step}", "type": "function", "function": {"name": "read", "arguments": arguments}}
        said["tool_calls"] = [call]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in said["tool_calls"]]
    return [said, *results]


def _check_room(target: Target, settings: Agent) -> None:
    steps = len(settings.results) + 1
    most = settings.prefix + 500 + sum(settings.results) + steps * (settings.output + 50)

    def mend(excess: int) -> str:
        if excess < settings.prefix:
            return f"--prefix {settings.prefix - excess}"
        return "shorter and fewer --results, --output with a smaller number"

    check_room(target, "a conversation", most, "code", mend)
