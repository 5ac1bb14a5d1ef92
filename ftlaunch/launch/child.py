"""Running the agent as a child in the terminal's foreground.

The child stays in our process group and shares our terminal. So the terminal itself tells it of Ctrl-C, Ctrl-\\ and a
changed window size; what is left to us is not to die of the first two, to pass on what is sent to our process alone,
and to stop and go on together with a child that stops itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

FROM_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)  # the whole foreground group gets these
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | None"


def run(argv: Sequence[str], environ: Mapping[str, str], directory: Path) -> int:
    """Run to the end. Returns its exit status, or 128 + n when signal n ended it. Raises OSError if it cannot start."""
    in_child = _ends_with_us() if sys.platform == "linux" else None
    with _signals() as passed_to, _terminal_restored():
        process = subprocess.Popen(argv, env=environ, cwd=directory, preexec_fn=in_child)
        passed_to(process.pid)
        status = _wait(process.pid)
        process.returncode = status
    return status


def _wait(pid: int) -> int:
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            _stop_with(pid)
        else:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _stop_with(pid: int) -> None:
    """A child that stopped gives the terminal back to the shell only if we stop too; `fg` wakes the group."""
    if _in_foreground():
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # no terminal
        return False


@contextlib.contextmanager
def _signals() -> Iterator[_PassOn]:
    """Handlers for the block. They are functions, not SIG_IGN, because a child would inherit that."""
    passed_to = _PassOn()
    before: dict[signal.Signals, _Handler] = {}
    for number in (*FROM_THE_TERMINAL, *PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup ft launch` stays so
            before[number] = signal.signal(number, passed_to.handle if number in PASSED_ON else _nothing)
    try:
        yield passed_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _PassOn:
    """Sends what arrives to the child; what came before it was there, as soon as it is."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._early: list[int] = []

    def __call__(self, pid: int) -> None:
        self._pid = pid
        for number in self._early:
            self._send(number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self._pid is None:
            self._early.append(number)
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


@contextlib.contextmanager
def _terminal_restored() -> Iterator[None]:
    """A full-screen program that was killed leaves the terminal without echo and line editing."""
    import termios

    try:
        fd = sys.stdin.fileno()
        modes = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    try:
        yield
    finally:
        if _in_foreground():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, modes)


def _ends_with_us() -> Callable[[], None]:
    """What the child does first: Linux shall end the agent when ft is killed, so that no agent stays without a server.

    Looked up before the fork: in the child a lock that another thread of ours held, as the import system has them, is
    never released.
    """
    import ctypes

    prctl, parent, number = ctypes.CDLL(None).prctl, os.getpid(), int(signal.SIGTERM)

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # killed before the line above
            os._exit(128 + number)

    return in_child
