"""Real servers, whichever way they end: what they served is remembered, and the next prediction follows it.

Slow: pytest -m slow tests/machine/test_remembered.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ftengine.kernels import native
from ftlaunch.cli import main
from ftlaunch.machine import served
from ftlaunch.servers import running, wait_ready
from ftlaunch.servers.options import ServeOptions
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.start import start_own

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.AVAILABLE, reason="the native library is not built"),
]


def asked(record: ServerRecord) -> tuple[float, float]:
    """Seconds until the first token of a cold prompt of 128, and tokens a second of the 95 after it."""
    body = {"prompt": list(range(1000, 1128)), "max_tokens": 96, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    if record.api_key:
        headers["Authorization"] = f"Bearer {record.api_key}"
    request = urllib.request.Request(f"{record.url}/v1/completions", json.dumps(body).encode(), headers)
    began, times = time.monotonic(), []
    with urllib.request.urlopen(request, timeout=120) as answer:
        times = [time.monotonic() for line in answer if b'"text"' in line]
    return times[0] - began, 95 / (times[-1] - times[0])


def speed(capsys: pytest.CaptureFixture[str], model: Path, *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["show", str(model), "--fit", "--json", *more]) == 0
    document = json.loads(capsys.readouterr().out)
    data: dict[str, Any] = next(each["data"] for each in document["findings"] if each["id"] == "model.speed")
    return data


def started(model: Path) -> tuple[subprocess.Popen[bytes], ServerRecord]:
    """In a group of its own, as a terminal's foreground job is."""
    command = [sys.executable, "-m", "ftlaunch", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while not (found := [record for record in running() if record.pid == process.pid]):
        assert process.poll() is None
        time.sleep(0.1)
    wait_ready(found[0])
    return process, found[0]


def interrupted(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C: the terminal signals the whole group."""
    os.killpg(process.pid, signal.SIGINT)


def stopped(process: subprocess.Popen[bytes]) -> None:
    assert main(["stop", "--all"]) == 0


@pytest.mark.parametrize("end", [interrupted, subprocess.Popen.terminate, stopped])
def test_a_server_that_ends(
    demo_model: Path, ft_home: Path, capsys: pytest.CaptureFixture[str], end: Callable[..., None]
) -> None:
    """Against what this client timed; what was told before is shown with its error."""
    first = speed(capsys, demo_model)
    process, record = started(demo_model)
    seconds, rate = asked(record)
    end(process)
    assert process.wait(10) == 0
    (entry,) = served.entries()
    (run,) = entry.served
    assert (run.server, run.setting.device, run.prompt is not None) == (record.id, "cpu", True)
    assert run.tokens_per_second == pytest.approx(rate, rel=0.5)
    assert run.prompt is not None
    assert run.prompt.seconds == pytest.approx(seconds, rel=0.5)
    after = speed(capsys, demo_model)
    assert after["served"]["rate"] == run.tokens_per_second
    assert after["predicted"] == first["prediction"]
    assert after["error"] == pytest.approx(after["predicted"]["tokens_per_second"][1] / run.tokens_per_second - 1)
    assert after["prompt_error"] is not None
    assert set(first) == set(after)


def test_the_last_lease(demo_model: Path, ft_home: Path) -> None:
    with ExitStack() as hold:
        record = start_own(ServeOptions(str(demo_model), port=0), hold)
        wait_ready(record)
        asked(record)
    deadline = time.monotonic() + 20
    while not served.entries() and time.monotonic() < deadline:
        time.sleep(0.1)
    (entry,) = served.entries()
    assert entry.served[0].server == record.id


def test_flags_have_records_of_their_own(demo_model: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one thread served says nothing of all of them."""
    process, record = started(demo_model)
    asked(record)
    interrupted(process)
    assert process.wait(10) == 0
    after = speed(capsys, demo_model)
    assert after["served"] is not None
    assert (after["predicted"], after["error"]) == (None, None), "nothing was told before, and now it is too late"
    if native.granted_threads() > 1:
        assert speed(capsys, demo_model, "--flags", "--threads 1")["served"] is None
