"""A real pseudo-terminal with a shell's job control on the other side."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from types import TracebackType

SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i")


class Terminal:
    """An interactive bash that leads its own session on a terminal of 100 x 30."""

    def __init__(self, environ: dict[str, str], directory: Path) -> None:
        self._master, self._slave = os.openpty()
        self.resize(100, 30)
        slave = self._slave

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self._shell = subprocess.Popen(
            SHELL, stdin=slave, stdout=slave, stderr=slave, env={**environ, "PS1": "ready> "}, cwd=directory,
            preexec_fn=own_terminal,
        )  # fmt: skip
        self.text = ""
        self.expect("ready> ")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.send_signal(signal.SIGHUP)
        os.close(self._slave)
        try:
            self._shell.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()
        os.close(self._master)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, pattern: str, patience: float = 60.0) -> str:
        """Read until the pattern has come; what was read up to its end is taken away and returned."""
        deadline = time.monotonic() + patience
        while True:
            found = re.search(pattern, self.text)
            if found:
                before, self.text = self.text[: found.end()], self.text[found.end() :]
                return before
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} did not come; the terminal shows:\n{self.text}"
            if select.select([self._master], [], [], left)[0]:
                self.text += os.read(self._master, 65_536).decode(errors="replace")

    def modes(self) -> list[object]:
        return termios.tcgetattr(self._slave)
