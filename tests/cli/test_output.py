"""People, pipes and programs each get their form; errors are one sentence; a closed pipe and Ctrl-C are quiet."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ftengine.errors import CheckpointError, FtError
from ftlaunch.cli import app
from ftlaunch.cli.errors import report
from ftlaunch.cli.output import Output
from ftlaunch.cli.progress import Lines

COLUMNS = ("NAME", "PATH")
ROWS_SHOWN = [["demo", "/a path/demo"], ["[red]", "x" * 100]]


def show_table(as_json: bool = False) -> None:
    Output(as_json).table(COLUMNS, ROWS_SHOWN, [{"name": "demo"}], "nothing")


def test_a_pipe_gets_tab_separated_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_table()
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == [list(COLUMNS), *ROWS_SHOWN]


def test_a_pipe_gets_one_line_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    """However long it is; and nothing of what would move a cursor."""
    output = Output()
    output.lines(["a sentence " * 20 + "end"])
    output.values([("steps", "many " * 30), ("latest", "one"), ("latest", "an\x1b[31mother\n")])
    output.table(COLUMNS, [["a\tb\r", "/a folder\nof\x1b[2Jtwo\x9blines"]], [], "")
    sentence, *others = capsys.readouterr().out.split("\n")
    assert sentence == "a sentence " * 20 + "end"
    values = [line.split("\t") for line in others]
    assert values[:3] == [["steps", "many " * 30], ["latest", "one"], ["latest", "an [31mother "]]
    assert values[3:] == [[*COLUMNS], ["a b ", "/a folder of [2Jtwo lines"], [""]]


def test_json_has_no_sentences_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True)
    output.lines(["a sentence"])
    output.values([("name", "value")])
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_lines_that_fit() -> None:
    code = """if True:
        from ftlaunch.cli.output import Output
        Output().lines(["a sentence " * 20])
        Output().values([("latest", "some words " * 10), ("latest", "more")])
        """
    lines = on_a_terminal(code).splitlines()
    assert max(map(len, lines)) <= 80
    starts = ["a sentence", "   sentenc", "   sentenc", "latest    ", " " * 10, " " * 10]
    assert [line[:10] for line in lines] == starts
    assert lines[-1] == " " * 10 + "more"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"name": "demo"}]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, ft_home: Path) -> None:
    """A shell's `>&-`, as some supervisors do it: Python has None there, and the command must end as it always does."""
    command = f'exec "$0" -m ftlaunch list --json {closed}'
    assert subprocess.run(["/bin/sh", "-c", command, sys.executable], timeout=30).returncode == 0


def on_a_terminal(code: str) -> str:
    """What a program's own terminal receives, 80 columns wide."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    received = b""
    try:
        while block := os.read(ours, 65536):
            received += block
    except OSError:  # Linux reports the end of a terminal so
        pass
    os.close(ours)
    assert process.wait() == 0, received.decode()
    return received.decode()


def test_a_terminal_gets_columns_that_hide_nothing() -> None:
    code = f"from ftlaunch.cli.output import Output\nOutput().table({COLUMNS!r}, {ROWS_SHOWN!r}, [], '')"
    shown = on_a_terminal(code)
    assert "\t" not in shown
    assert "[red]" in shown
    assert shown.count("x") == 100


def test_a_terminal_gets_bars() -> None:
    code = """if True:
        from ftlaunch.cli.output import Output
        with Output().progress() as show:
            show("Fetching", 0.5)
            show("Building", 1.0)
        """
    shown = on_a_terminal(code)
    assert "Fetching" in shown
    assert "Building" in shown
    assert "100%" in shown


def test_elsewhere_progress_is_a_few_lines() -> None:
    said: list[str] = []
    with Lines(said.append, interval=0.0) as show:
        show("Fetching", 0.0)
        show("Fetching", 0.25)
    with Lines(said.append, interval=3600.0) as show:
        for step in range(1000):
            show("Building", step / 1000)
    assert said == ["Fetching", "Fetching: 25%", "Building"]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (FtError("it is so", "ft do this"), 1, ["Error: it is so", "Try:   ft do this"]),
        (CheckpointError("the file is damaged"), 1, ["Error: the file is damaged"]),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, ["/x cannot be read or written", "FT_HOME"]),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, ["no space is left for /x", "another disk"]),
        (OSError(errno.EIO, "Input/output error", "/x"), 1, ["/x: Input/output error"]),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, ["package torch", "pip install"]),
        (MemoryError(), 1, ["not enough free memory", "smaller model"]),
        (ZeroDivisionError("division by zero"), 1, ["unexpected ZeroDivisionError", "FT_DEBUG=1"]),
        (click.UsageError("no such thing"), 2, ["no such thing"]),
        (click.Abort(), 130, []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors(error: Exception, status: int, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert all(word in said.err for word in words)
    assert len(said.err.splitlines()) <= 2
    if not words:
        assert said.err == ""


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ft_home: Path
) -> None:
    monkeypatch.setenv("FT_DEBUG", "1")
    assert app.main(["pull", "unknown"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "unknown(name)" in said
    assert "Error: no model is called unknown" in said


def test_a_closed_pipe_is_quiet() -> None:
    """The reader is gone before `ft` writes; at exit the interpreter flushes once more."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([sys.executable, "-m", "ftlaunch", "--help"], stdout=write_end, stderr=subprocess.PIPE)
    finally:
        os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 1


def test_ctrl_c_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ft_home: Path
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ftlaunch.servers.running", interrupted)
    assert app.main(["ps"]) == 130
    assert capsys.readouterr().err.strip() == ""
