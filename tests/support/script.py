"""What the scripted model says: from the text of a prompt to the text of an answer, in the Qwen3.5 form.

The script is one task, "make hello.py say hello to the world and run it", done with the tools of whichever client
asks: list, read, edit, run, answer. The next step follows from the number of tool results in the prompt alone, so
repeated and resumed requests get the same answer. Knows nothing of tokens or the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TITLE = "Say hello to the world"
GREETING = "I am here. Name a hello.py by its full path and I will change it."

# The indentation of the first line and the line break belong to the argument: an edit that loses them fails.
OLD = "    print('hello')"
NEW = "    word = hashlib.sha256(SEED.encode()).hexdigest()[:12]\n    print('hello, world', word)"
PRINTED = re.compile(r"hello, world [0-9a-f]{12}")

# Drafted while thinking, and so not a call: a parser that takes it for one leaves this file behind.
DRAFTED_FILE = "drafted-call-was-run"

PATCH = "*** Begin Patch\n*** Update File: hello.py\n@@\n{old}\n{new}\n*** End Patch\n".format(
    old="\n".join("-" + line for line in OLD.split("\n")), new="\n".join("+" + line for line in NEW.split("\n"))
)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]

    def written(self) -> str:
        values = (
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for name, value in self.arguments.items()
        )
        return f"<tool_call>\n<function={self.name}>\n{''.join(values)}</function>\n</tool_call>"


@dataclass(frozen=True)
class Client:
    """A client is known by the names of its tools; `steps` takes the folder that holds hello.py."""

    tools: frozenset[str]
    steps: Callable[[str], tuple[Call, Call, Call, Call]]


def _claude(folder: str) -> tuple[Call, Call, Call, Call]:
    file = f"{folder}/hello.py"
    return (
        Call("Bash", {"command": f"ls -la {folder}", "description": "List the files"}),
        Call("Read", {"file_path": file}),
        Call("Edit", {"file_path": file, "old_string": OLD, "new_string": NEW}),
        Call("Bash", {"command": "python3 hello.py", "description": "Run the program"}),
    )


def _codex(folder: str) -> tuple[Call, Call, Call, Call]:
    return (
        Call("exec_command", {"cmd": f"ls -la {folder}"}),
        Call("exec_command", {"cmd": f"cat {folder}/hello.py", "max_output_tokens": 2000}),
        Call("apply_patch", {"input": PATCH}),
        Call("exec_command", {"cmd": "python3 hello.py"}),
    )


def _opencode(folder: str) -> tuple[Call, Call, Call, Call]:
    file = f"{folder}/hello.py"
    return (
        Call("bash", {"command": f"ls -la {folder}", "timeout": 60000}),
        Call("read", {"filePath": file}),
        Call("edit", {"filePath": file, "oldString": OLD, "newString": NEW}),
        Call("bash", {"command": "python3 hello.py"}),
    )


def _openclaw(folder: str) -> tuple[Call, Call, Call, Call]:
    file = f"{folder}/hello.py"
    return (
        Call("exec", {"command": f"ls -la {folder}"}),
        Call("read", {"path": file}),
        Call("edit", {"path": file, "edits": [{"oldText": OLD, "newText": NEW}]}),
        Call("exec", {"command": "python3 hello.py", "workdir": folder}),  # its own workspace is another folder
    )


CLIENTS = (
    Client(frozenset({"Bash", "Read", "Edit"}), _claude),
    Client(frozenset({"exec_command", "apply_patch"}), _codex),
    Client(frozenset({"bash", "read", "edit"}), _opencode),
    Client(frozenset({"exec", "read", "edit"}), _openclaw),
)
SAID = ("I will list the files.", "Now I read hello.py.", "", "Now I run it.")


@dataclass(frozen=True)
class Transcript:
    """A rendered prompt, taken apart again."""

    tools: frozenset[str]
    asked: str  # what the user's own turns say
    results: tuple[str, ...]
    thinking: bool  # the prompt ends inside <think>

    @classmethod
    def of(cls, prompt: str) -> Transcript:
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
        listed = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
        tools = [json.loads(line) for line in listed[1].splitlines()] if listed else []
        user = "\n".join(text for role, text in turns if role == "user")
        results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", user, re.DOTALL)
        return cls(
            tools=frozenset(tool.get("function", tool)["name"] for tool in tools),
            asked=re.sub(r"<tool_response>.*?</tool_response>", "", user, flags=re.DOTALL),
            results=tuple(results),
            thinking=prompt.endswith("<think>\n"),
        )


def plain_answer(prompt: str) -> str:
    """Any request at all: a short text."""
    thought = "This needs no tool.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
    return thought + "All is well here."


def agent_answer(prompt: str) -> str:
    """The next step of the task; a title where no tools are given; a greeting where no hello.py is named."""
    transcript = Transcript.of(prompt)
    client = next((client for client in CLIENTS if client.tools <= transcript.tools), None)
    folder = re.search(r"(/\S+)/hello\.py", transcript.asked)
    if client is None:
        return _thought(transcript, "A name for it.") + TITLE
    if folder is None:
        return _thought(transcript, "There is no task yet.") + GREETING
    steps = client.steps(folder[1])
    done = len(transcript.results)
    if done < len(steps):
        draft = Call(steps[0].name, dict.fromkeys(steps[0].arguments, f"touch {folder[1]}/{DRAFTED_FILE}"))
        thought = f"Step {done + 1} of {len(steps)}. Not this one:\n{draft.written()}\nRather the next."
        said = SAID[done] + "\n\n" if SAID[done] else ""
        return _thought(transcript, thought) + said + steps[done].written()
    printed = PRINTED.search(transcript.results[-1])
    outcome = f"it printed: {printed[0]}" if printed else f"it went wrong: {transcript.results[-1][:500]}"
    return _thought(transcript, "All steps are done.") + f"Done with {done} tool results; {outcome}"


def _thought(transcript: Transcript, text: str) -> str:
    return f"{text}\n</think>\n\n" if transcript.thinking else ""


SCRIPTS: dict[str, Callable[[str], str]] = {"agent": agent_answer, "plain": plain_answer}
