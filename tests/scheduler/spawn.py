"""Starts the real engine process over a socketpair, and speaks frames with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from ftengine import wire
from ftengine.config import EngineConfig
from ftengine.core import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """`with EngineProcess(folder) as engine`: killed at the end if it still lives."""

    def __init__(
        self, model_dir: Path | str, *, plugins: str = "tests.scheduler.tiny", json: str = "", **config
    ) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.socket.settimeout(60)
        # The tests' own modules, and ftengine from where this process has it: its sources lack the built library.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        text = json or EngineConfig(str(model_dir), **{"threads": 1, **config}).to_json()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftengine.process", "--fd", str(theirs.fileno()), "--config", text],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, "FT_PLUGINS": plugins},
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.loading: list[wire.Loading] = []

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def send(self, *messages) -> None:
        self.socket.sendall(b"".join(wire.encode(message) for message in messages))

    def receive(self):
        """The next message; EOFError at the end."""
        (length,) = wire.HEADER.unpack(self._exactly(wire.HEADER.size))
        return wire.decode_to_front(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def start(self):
        """What comes after the Loading frames: Ready or Fatal."""
        while isinstance(message := self.receive(), wire.Loading):
            self.loading.append(message)
        return message

    def submit(self, name: str, prompt: list[int], count: int = 8, **sampling) -> None:
        params = SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.send(wire.Submit(Request(name, prompt, params)))

    def collect(self, *names: str) -> dict[str, list[wire.Output | wire.Failed]]:
        """Everything said until each of the requests has ended."""
        said: dict[str, list] = {name: [] for name in names}
        open_requests = set(names)
        while open_requests:
            message = self.receive()
            if isinstance(message, (wire.Output, wire.Failed)):
                said.setdefault(message.id, []).append(message)
                if isinstance(message, wire.Failed) or message.finish is not None:
                    open_requests.discard(message.id)
        return said

    def generate(self, prompt: list[int], count: int = 8, name: str = "only", **sampling) -> list[int]:
        self.submit(name, prompt, count, **sampling)
        return tokens(self.collect(name)[name])

    def stats(self) -> dict:
        self.send(wire.AskStats())
        while not isinstance(message := self.receive(), wire.Stats):
            pass
        return message.values

    def wait(self, seconds: float) -> float:
        """How long the process took to end; raises subprocess.TimeoutExpired if it did not."""
        started = time.monotonic()
        self.process.wait(seconds)
        return time.monotonic() - started


def tokens(said: list) -> list[int]:
    assert not any(isinstance(message, wire.Failed) for message in said), said
    return [token for message in said for token in message.tokens]
