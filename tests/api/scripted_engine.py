"""Plays the engine process for the front's tests: speaks ftengine.wire, computes nothing.

A prompt is bytes (tests/api/byte_dialect.py). When its last user text is a JSON object, that object says how to
answer; any other text is answered with "ok". Keys:

    say       text of the answer, in bytes as tokens
    repeat    how many times `say` is said
    hold      seconds before anything, even the first Output
    gate      true: waits for the file model_dir/gate before anything
    end_gate  true: waits for it after the text, before the end
    tag       written into engine.log with the request
    delay     seconds between two Outputs
    size      tokens an Output (3: characters are cut in the middle)
    cached    tokens of the prompt reported as cached
    reused    the other fields of core.Reused, told with the first Output
    finish    "stop" (an end token follows) or "length"
    die       exit code: end the process after the text instead of finishing
    fail      message of a Failed frame instead of an answer; "overloaded" with it

model_dir/engine.json: load (seconds), gate (true: loads until model_dir/gate exists), fatal (a sentence), die_loading
(exit code). What happens to requests is appended to model_dir/engine.log as JSON lines.

model_dir/trace says what becomes of a recording of routing: "refuse", "hold", "die". Without it TRACE is the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftengine import wire
from ftengine.config import EngineConfig
from ftengine.core import FinishReason, Request, Reused

CONTEXT = 4096
END = 256
TRACE = b"PK\x00\xff\n"


class ScriptedEngine:
    def __init__(self, folder: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.folder = folder
        self.reader = reader
        self.writer = writer
        self.tasks: dict[str, asyncio.Task[None]] = {}
        path = folder / "engine.json"
        self.options: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def log(self, event: str, **fields: Any) -> None:
        with (self.folder / "engine.log").open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    async def send(self, message: wire.ToFront) -> None:
        if not self.writer.is_closing():
            self.writer.write(wire.encode(message))
            await self.writer.drain()

    async def gate(self) -> None:
        while not (self.folder / "gate").exists():
            await asyncio.sleep(0.01)

    async def run(self) -> int:
        self.log("start", pid=os.getpid())
        await self.send(wire.Loading("reading weights", 0.25))
        if "die_loading" in self.options:
            return int(self.options["die_loading"])
        if "fatal" in self.options:
            await self.send(wire.Fatal(self.options["fatal"], "ft list"))
            return 1
        await asyncio.sleep(self.options.get("load", 0))
        if "gate" in self.options:
            await self.gate()
        await self.send(
            wire.Ready(
                architecture="Bytes",
                context_length=CONTEXT,
                max_running=4,
                dtype="float32",
                device="cpu",
                kv_tokens=4 * CONTEXT,
                facts={"threads": {"value": 1, "reason": "scripted"}},
            )
        )
        while True:
            try:
                (length,) = wire.HEADER.unpack(await self.reader.readexactly(wire.HEADER.size))
                message = wire.decode_to_engine(await self.reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return 0
            if isinstance(message, wire.Submit):
                request = message.request
                self.log(
                    "submit",
                    id=request.id,
                    tag=script_of(request.prompt).get("tag"),
                    tokens=len(request.prompt),
                    max_tokens=request.sampling.max_tokens,
                    session=request.session,
                    side=request.side,
                    boundaries=msgspec.to_builtins(request.boundaries),
                    boundary_tokens=request.boundary_tokens,
                )
                self.tasks[request.id] = asyncio.ensure_future(self.answer(request))
            elif isinstance(message, wire.Cancel):
                task = self.tasks.pop(message.id, None)
                if task is not None and task.cancel():
                    self.log("cancel", id=message.id)
            elif isinstance(message, wire.AskStats):
                await self.send(wire.Stats({"running": len(self.tasks)}))
            elif isinstance(message, wire.Trace):
                self.log("trace", id=message.id, steps=message.steps)
                path = self.folder / "trace"
                kind = path.read_text() if path.exists() else ""
                if kind == "die":
                    os._exit(1)
                if kind == "refuse":
                    await self.send(wire.Traced(message.id, refusal="nothing to record"))
                elif kind != "hold":
                    await self.send(wire.Traced(message.id, TRACE))
            elif isinstance(message, wire.StopTrace):
                self.log("stop trace", id=message.id)
            elif isinstance(message, wire.Shutdown):
                return 0

    async def answer(self, request: Request) -> None:
        script = script_of(request.prompt)
        cached = script.get("cached", 0)
        await asyncio.sleep(script.get("hold", 0))
        if "gate" in script:
            await self.gate()
        if "fail" in script:
            await self.send(wire.Failed(request.id, script["fail"], script.get("overloaded", False)))
            return
        reused = msgspec.convert({"tokens": cached, **script["reused"]}, Reused) if "reused" in script else None
        await self.send(wire.Output(request.id, [], cached, reused=reused))
        tokens = list(script.get("say", "ok").encode()) * script.get("repeat", 1)
        size, limit = script.get("size", 3), request.sampling.max_tokens
        finish = FinishReason(script.get("finish", "stop"))
        if len(tokens) >= limit:
            tokens, finish = tokens[:limit], FinishReason.LENGTH
        for start in range(0, len(tokens), size):
            await asyncio.sleep(script.get("delay", 0))
            piece = tokens[start : start + size]
            await self.send(wire.Output(request.id, piece, cached, None, logprobs(piece, request.sampling.logprobs)))
        if "end_gate" in script:
            await self.gate()
        if "die" in script:
            os._exit(script["die"])
        last = [END] if finish is FinishReason.STOP else []
        await self.send(wire.Output(request.id, last, cached, finish))
        self.log("finish", id=request.id)
        self.tasks.pop(request.id, None)


def logprobs(tokens: list[int], count: int | None) -> list[wire.TokenLogprob] | None:
    if count is None:
        return None
    return [wire.TokenLogprob(token, -0.5, [(token, -0.5), (END, float("-inf"))][:count]) for token in tokens]


def script_of(tokens: Sequence[int]) -> dict[str, Any]:
    prompt = bytes(token for token in tokens if token < 256)
    turns = re.findall(rb"<user>(.*?)<end>", prompt, re.DOTALL)
    try:
        script = json.loads(turns[-1] if turns else prompt)
    except (ValueError, RecursionError):
        return {}
    return script if isinstance(script, dict) else {}


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=options.fd))
    folder = Path(EngineConfig.from_json(options.config).model_dir)
    engine = ScriptedEngine(folder, reader, writer)
    code = await engine.run()
    for task in engine.tasks.values():
        task.cancel()
    writer.close()
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
