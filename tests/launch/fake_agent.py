#!/usr/bin/env python3
"""A double of an agent's program, for what launch does around it. Started under the agents' names.

Writes what it was given to $DOUBLE_REPORT, then does what $DOUBLE_DOES says: `exit N`, `die N` (by signal N), `wait`
(until a file $DOUBLE_REPORT.go appears), `signals` (append the name of each signal to $DOUBLE_REPORT.signals until
SIGTERM), `stop` (stop itself as a full-screen program does on Ctrl-Z, then exit 3).
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

report = Path(os.environ["DOUBLE_REPORT"])


def facts() -> dict:
    size = None
    with contextlib.suppress(OSError):
        size = list(os.get_terminal_size(0))
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "size": size,
        "cwd": os.getcwd(),
        "ignored": [s.name for s in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(s) is signal.SIG_IGN],
    }


def write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.rename(path)


def note_signal(number: int, frame: object) -> None:
    text = signal.Signals(number).name
    if number == signal.SIGWINCH:
        text += " {}x{}".format(*os.get_terminal_size(0))
    with report.with_suffix(".signals").open("a") as file:
        file.write(text + "\n")
    if number == signal.SIGTERM:
        sys.exit(9)


action, _, value = os.environ.get("DOUBLE_DOES", "exit 0").partition(" ")
if action == "signals":
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
        signal.signal(each, note_signal)
write(report, json.dumps(facts()))
if action == "die":
    os.kill(os.getpid(), int(value))
while action == "signals" or (action == "wait" and not report.with_suffix(".go").exists()):
    time.sleep(0.05)
if action == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(3)
sys.exit(int(value or 0))
