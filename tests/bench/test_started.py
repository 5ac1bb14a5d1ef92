"""Servers that the command starts: real ones, with a model whose pace grows with --threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftlaunch.bench.load import forget, timeline
from ftlaunch.cli import main
from ftlaunch.servers import running
from tests.bench.conftest import Bench
from tests.support.serving import SCRIPTED_CHECKPOINT

MODEL = str(SCRIPTED_CHECKPOINT)
SHORT = ("--prompts", "tokens", "--prompt", "8", "--output", "12", "--warmup", "0")


def test_two_sets_of_flags(paced_home: Path, bench: Bench) -> None:
    flags = ("--flags", "--threads 1", "--flags", "--threads 8")
    for _ in range(4):
        report = bench("decode", "--model", MODEL, *flags, "--turns", "1", *SHORT)
        if report["comparisons"][0]["verdict"] != "within noise":  # this machine stood still during one of six answers
            break
    assert [variant["what"] for variant in report["variants"]] == [f"{MODEL} --threads {n}" for n in (1, 8)]
    [found] = report["comparisons"]
    assert (found["first"], found["second"], found["verdict"]) == ("A", "B", "slower")
    assert 1 / 20 < found["times_as_fast"] < 0.8  # an eighth, on a machine that does nothing else
    assert found["low"] <= found["times_as_fast"] <= found["high"] < 1
    assert running() == []


@pytest.mark.slow
def test_in_turns(paced_home: Path, bench: Bench) -> None:
    """Four starts. The same flags twice do not differ."""
    report = bench("decode", "--model", MODEL, "--flags", "--threads 2", "--flags", "--threads 2", *SHORT)
    assert [len(variant["points"][0]["turns"]) for variant in report["variants"]] == [2, 2]
    logs = sorted((paced_home / "run" / "logs").iterdir())
    assert len(logs) == 4
    [found] = report["comparisons"]
    assert 0.8 < found["times_as_fast"] < 1.25


def test_starts(paced_home: Path, bench: Bench) -> None:
    report = bench("load", "--model", MODEL, "--runs", "1", "--no-cold")
    [point] = report["variants"][0]["points"]
    found = point["median"]
    assert 0 < found["listens_s"] < found["ready_s"]
    stages = {name: seconds for name, seconds in found.items() if name.startswith("stage: ")}
    assert {"stage: weights", "stage: warm-up"} <= stages.keys()
    assert sum(stages.values()) < found["ready_s"]
    assert found["first_token_ms"] > 0
    assert running() == []


def test_ctrl_c_ends_the_server(paced_home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ftlaunch",
        "bench",
        "decode",
        "--model",
        MODEL,
        "--output",
        "1000",
        "--runs",
        "99",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while (line := process.stderr.readline()) and "decode, 1 stream" not in line:
            pass
        assert len(running()) == 1
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in errors
    assert running() == []


@pytest.mark.slow
def test_a_start_that_fails_says_why(paced_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--model", MODEL, "--flags", "--moe-backend hybrid --device cuda"]) == 1
    error = capsys.readouterr().err
    assert "Error: " in error
    assert "Traceback" not in error
    assert running() == []


def test_the_timeline_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("I start: 9.00 s (old 9.00)\nI start: 5.61 s (torch 2.17, two words 0.04, warm-up 3.40)\nI ready\n")
    assert timeline(log) == {"stage: torch": 2.17, "stage: two words": 0.04, "stage: warm-up": 3.4}
    assert timeline(tmp_path / "none") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_forgotten_files_are_read_from_the_disk_again(tmp_path: Path) -> None:
    """Against the process's own count of bytes that came from a disk."""

    def from_disk() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    file = tmp_path / "weights"
    file.write_bytes(bytes(8 << 20))
    for again in (False, True):
        if again:
            forget(tmp_path)
        before = from_disk()
        file.read_bytes()
        read = from_disk() - before
        # Besides the file: pages of libraries that other programs' work has driven out of memory.
        if again and read < 1 << 20:
            pytest.skip("this file system lies in memory, or does not count what is read")
        assert (read >= 8 << 20) == again
