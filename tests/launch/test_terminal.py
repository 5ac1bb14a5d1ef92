"""The child in the terminal's foreground, under a real pseudo-terminal and a shell's job control."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from ftlaunch.launch import child
from tests.launch.place import Place, is_alive, until
from tests.launch.terminal import Terminal

RUN = (
    "import os, sys; from pathlib import Path; from ftlaunch.launch import child; "
    "sys.exit(child.run(['claude'], dict(os.environ), Path.cwd()))"
)
COMMAND = f'"{sys.executable}" -c "{RUN}"; echo "status=$?"\n'


@pytest.fixture
def terminal(place: Place) -> Iterator[Terminal]:
    with Terminal(place.environment, place.repository) as terminal:
        yield terminal


def run(terminal: Terminal, does: str) -> None:
    terminal.type(f"export DOUBLE_DOES='{does}'\n")
    terminal.expect("ready> ")
    terminal.type(COMMAND)


def signals(place: Place) -> list[str]:
    path = place.report.with_suffix(".signals")
    return path.read_text().splitlines() if path.exists() else []


def test_same_terminal_and_foreground_group(place: Place, terminal: Terminal) -> None:
    run(terminal, "exit 5")
    terminal.expect("status=5")
    seen = place.seen()
    assert seen["size"] == [100, 30]
    assert seen["group"] != os.getpgrp()
    assert seen["ignored"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_between_fork_and_exec_nothing_is_imported() -> None:
    """A thread of ft may have held the import lock at the fork: nobody would release it in the child."""
    first = child._ends_with_us()

    def import_nothing(*args: object) -> None:
        raise AssertionError("an import after the fork")

    def in_child() -> None:
        builtins.__import__ = import_nothing  # type: ignore[assignment]
        first()

    code = "import ctypes; found = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(found)); print(found.value)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=in_child)
    told, _ = process.communicate(timeout=60)
    assert int(told) == signal.SIGTERM  # PR_GET_PDEATHSIG


def test_interrupt_keys_are_the_agents(place: Place, terminal: Terminal) -> None:
    """Ctrl-C and Ctrl-\\ reach the agent once each, and do not end ft."""
    run(terminal, "signals")
    seen = place.seen()
    terminal.type("\x03")
    until(lambda: signals(place) == ["SIGINT"], "the agent sees Ctrl-C")
    terminal.type("\x1c")
    until(lambda: signals(place) == ["SIGINT", "SIGQUIT"], "the agent sees Ctrl-\\")
    assert is_alive(seen["parent"])
    os.kill(seen["parent"], signal.SIGTERM)
    terminal.expect("status=9")
    assert signals(place) == ["SIGINT", "SIGQUIT", "SIGTERM"]


def test_window_size_is_passed_on(place: Place, terminal: Terminal) -> None:
    run(terminal, "signals")
    seen = place.seen()
    terminal.resize(132, 43)
    until(lambda: signals(place) == ["SIGWINCH 132x43"], "the agent sees the new size")
    os.kill(seen["parent"], signal.SIGTERM)
    terminal.expect("status=9")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_sent_to_ft_are_passed_on(number: signal.Signals, place: Place, terminal: Terminal) -> None:
    run(terminal, "signals")
    os.kill(place.seen()["parent"], number)
    until(lambda: number.name in signals(place), f"the agent gets {number.name}")
    if number != signal.SIGTERM:
        os.kill(place.seen()["parent"], signal.SIGTERM)
    terminal.expect("status=9")


def test_suspend_key_gives_the_shell_back(place: Place, terminal: Terminal) -> None:
    run(terminal, "wait")
    seen = place.seen()
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.expect("ready> ")
    terminal.type("fg\n")
    terminal.expect("sys.exit")
    place.report.with_suffix(".go").touch()
    terminal.expect("ready> ")
    until(lambda: not is_alive(seen["pid"]), "the agent ends")


def test_agent_that_stops_itself(place: Place, terminal: Terminal) -> None:
    """A full-screen program reads Ctrl-Z as a key and stops only itself: ft has to follow, or the shell stays mute."""
    run(terminal, "stop")
    terminal.expect("Stopped")
    terminal.expect("ready> ")
    terminal.type("fg; echo after=$?\n")
    terminal.expect("after=3")


def test_ft_alone_is_woken_and_wakes_the_agent_that_stopped_itself(place: Place, terminal: Terminal) -> None:
    """As a job manager does, or `kill -CONT`; `fg` wakes the whole group."""
    run(terminal, "stop")
    terminal.expect("Stopped")
    terminal.expect("ready> ")
    seen = place.seen()
    os.kill(seen["parent"], signal.SIGCONT)
    until(lambda: not is_alive(seen["pid"]), "the agent goes on to its end")


def test_terminal_modes_survive_a_killed_agent(place: Place, terminal: Terminal) -> None:
    (place.bin / "claude").write_text("#!/bin/sh\nstty raw -echo <&0\nkill -9 $$\n")
    before = terminal.modes()
    run(terminal, "")
    terminal.expect("status=137")
    until(lambda: terminal.modes() == before, "the terminal's modes are back")
    assert int(terminal.modes()[3]) & termios.ECHO  # type: ignore[call-overload]


@pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent through a Linux system call")
def test_agent_ends_with_a_killed_ft(place: Place, terminal: Terminal) -> None:
    run(terminal, "wait")
    seen = place.seen()
    os.kill(seen["parent"], signal.SIGKILL)
    terminal.expect("status=137")
    until(lambda: not is_alive(seen["pid"]), "the agent ends")
