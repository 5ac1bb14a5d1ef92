"""The registry of running servers and their life in the background, with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ftengine import leases
from ftengine.errors import FtError
from ftlaunch import paths
from ftlaunch.cli import main
from ftlaunch.servers import (
    ServerLeaving,
    ServerRecord,
    find,
    health,
    join,
    running,
    start_background,
    stop,
    wait_ready,
)
from ftlaunch.servers.key import key_path, shared_key
from ftlaunch.servers.registry import port_path, record_path
from tests.support.ports import free_port
from tests.support.serving import SCRIPTED_CHECKPOINT, scripted_environment

MODEL = str(SCRIPTED_CHECKPOINT)
NAME = SCRIPTED_CHECKPOINT.name

HOLD_A_RECORD = """
import sys, time
from pathlib import Path
from ftlaunch.servers import ServerRecord, publish
from ftlaunch.servers.registry import port_path
import os
record = ServerRecord(id=sys.argv[1], pid=os.getpid(), host="127.0.0.1", port=1, model="demo", served_name="demo",
                      log=None, started=float(sys.argv[2]), api_key="secret", lease_dir=Path("/tmp/x"))
with publish(record):
    port_path(record.id).write_text('{"port": 4321}')
    print("published", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def home(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An FT_HOME in which the scripted model can be served; every server that is left over is ended."""
    for name, value in scripted_environment(ft_home).items():
        monkeypatch.setenv(name, value)
    yield ft_home
    for record in running():
        stop(record, patience=1.0)


@pytest.fixture
def free_1919(monkeypatch: pytest.MonkeyPatch) -> int:
    """The default port for this test: one that nothing else on this machine uses."""
    port = free_port()
    monkeypatch.setattr("ftlaunch.servers.start.DEFAULT_PORT", port)
    return port


def hold_record(server_id: str, started: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_RECORD, server_id, str(started)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"
    return process


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)
    process.communicate(timeout=60)


def test_records_live_as_long_as_their_process(home: Path) -> None:
    old, new = hold_record("old", 1.0), hold_record("new", 2.0)
    try:
        assert [record.id for record in running()] == ["old", "new"]
        record = running()[0]
        assert (record.pid, record.port, record.url) == (old.pid, 4321, "http://127.0.0.1:4321")
        assert record.lease_dir == Path("/tmp/x")
        assert record_path("old").stat().st_mode & 0o777 == 0o600
        assert paths.servers().stat().st_mode & 0o777 == 0o700
        newest = find(None)
        assert newest is not None
        assert newest.id == "new"
        end(new, signal.SIGKILL)
        assert [record.id for record in running()] == ["old"]
        assert not record_path("new").exists(), "a dead server's record was left"
        assert not port_path("new").exists()
    finally:
        end(old, signal.SIGKILL)
        end(new, signal.SIGKILL)
    assert find("demo") is None


def test_a_record_of_another_process_with_the_same_id_number(home: Path) -> None:
    """A leftover whose process id now belongs to a living process (this one) is not taken for a server."""
    paths.private(paths.servers())
    content = {"id": "x", "pid": os.getpid(), "host": "127.0.0.1", "port": 1, "model": "demo", "served_name": "demo"}
    content |= {"log": None, "started": time.time(), "api_key": None, "lease_dir": None}
    record_path("x").write_text(json.dumps(content))
    port_path("x").write_text('{"port": 1}')
    assert running() == []
    assert not record_path("x").exists()


def test_a_record_counts_only_once_its_server_listens(home: Path) -> None:
    process = hold_record("early", 1.0)
    try:
        port_path("early").unlink()
        assert running() == []
        assert record_path("early").exists()
    finally:
        end(process, signal.SIGKILL)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"port": "x"}', b"\xff" * 100, b"[" * 100_000])
def test_damaged_files_are_no_servers(home: Path, content: bytes) -> None:
    process = hold_record("x", 1.0)
    try:
        port_path("x").write_bytes(content)
        assert running() == []
        record_path("x").write_bytes(content)
        port_path("x").write_bytes(b'{"port": 1}')
        assert running() == []
    finally:
        end(process, signal.SIGKILL)


def test_starts_at_once_give_one_server(home: Path, free_1919: int) -> None:
    """Six callers, each with its own lock: one server, in its own session, its key known to its owner only."""
    found: list[ServerRecord] = []
    callers = [threading.Thread(target=lambda: found.append(start_background(MODEL, leased=False))) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 6
    assert {record.id for record in found} == {found[0].id}
    assert running() == [found[0]]
    record = found[0]
    stages: list[tuple[str, float]] = []
    answer = wait_ready(record, lambda stage, done: stages.append((stage, done)))
    assert (answer["status"], answer["model"]) == ("ready", NAME)
    assert answer["context_length"] > 0
    assert all(0.0 <= done <= 1.0 for _, done in stages)

    assert (record.port, record.model, record.served_name) == (free_1919, MODEL, NAME)
    assert os.getsid(record.pid) == record.pid != os.getsid(0)
    assert record.api_key is not None
    assert len(record.api_key) >= 32
    assert record.api_key not in " ".join(psutil.Process(record.pid).cmdline())
    assert record.log is not None
    assert record.log.stat().st_mode & 0o777 == 0o600
    assert "listening on" in record.log.read_text()
    for typed in (MODEL, NAME, None):
        assert find(typed) == record

    family = psutil.Process(record.pid).children(recursive=True)
    assert family, "the engine is not a child of the server"
    assert stop(record, patience=30.0)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert running() == []
    assert not stop(record)


def test_ps_and_stop_name_what_runs(home: Path, free_1919: int, capsys: pytest.CaptureFixture[str]) -> None:
    record = start_background(MODEL, context=512)
    assert record.lease_dir is not None
    with leases.acquire(record.lease_dir):
        wait_ready(record)
        assert main(["ps"]) == 0
        headings, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
        shown = dict(zip(headings, row, strict=True))
        assert shown.pop("UP").endswith("s")
        assert shown == {
            "MODEL": NAME,
            "URL": record.url,
            "STATE": "ready",
            "PID": str(record.pid),
            "DEVICE": "cpu",
            "CONTEXT": "512",
            "LAUNCHES": "1",
            "LOG": str(record.log),
        }
        assert main(["serve", "--model", MODEL, "--port", str(record.port)]) == 1
        refused = capsys.readouterr().err
        assert f"port {record.port} is held by ft's server of {NAME} (pid {record.pid})" in refused
        assert main(["stop", "something"]) == 1
        assert f"running: {NAME} (port {record.port})" in capsys.readouterr().err
        assert main(["stop", str(record.port)]) == 0
        assert f"Stopped {NAME}" in capsys.readouterr().out
    assert running() == []


def test_flags_of_a_gpu_where_there_is_none(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that finds no GPU; the sentence comes from the engine process, through the front."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for flags, says in (
        (["--device", "cuda"], "Error: no GPU here: "),
        (["--moe-cache-rate", "0.5"], "Error: --moe-cache-rate needs a GPU, and no GPU is used here: "),
        (["--moe-backend", "hybrid", "--device", "cpu"], "Error: --moe-backend hybrid needs a GPU"),
    ):
        assert main(["serve", "--model", MODEL, "--port", "0", *flags]) == 1
        said = capsys.readouterr().err
        assert says in said
        assert "\nTry:   ft serve" in said
        assert "Traceback" not in said


def test_a_killed_server_is_forgotten_and_its_engine_ends(home: Path, free_1919: int) -> None:
    record = start_background(MODEL, leased=False)
    wait_ready(record)
    family = psutil.Process(record.pid).children(recursive=True)
    os.kill(record.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert gone
    assert not alive
    assert running() == []
    assert health(record) is None
    with pytest.raises(FtError, match="ended before it was ready") as caught:
        wait_ready(record)
    assert str(record.log) in caught.value.next_step
    again = start_background(MODEL, leased=False)
    assert again.id != record.id
    assert again.api_key == record.api_key, "an agent that outlived the first server is answered by the second"


def test_a_key_that_others_could_read_is_replaced(home: Path) -> None:
    key_path().parent.mkdir(parents=True)
    first = shared_key()
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert shared_key() == first
    key_path().chmod(0o644)
    second = shared_key()
    assert second != first
    assert key_path().stat().st_mode & 0o777 == 0o600
    key_path().write_text("short")
    assert len(shared_key()) >= 32


def test_another_programs_port_is_left_alone(home: Path, free_1919: int) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", free_1919)):
        record = start_background(MODEL, on_message=said.append)
    assert record.port != free_1919
    assert any(f"Port {free_1919} is held by " in line and str(record.port) in line for line in said)
    assert health(record) is not None


def test_a_server_that_cannot_start_says_why(home: Path, free_1919: int, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "vocab_size": 8}))
    with pytest.raises(FtError) as caught:
        wait_ready(start_background(str(broken)))
    assert "\n" not in str(caught.value)
    assert str(caught.value) != ""
    with pytest.raises(FtError, match="not in the store yet"):
        start_background("demo")


def test_a_hostile_working_directory_is_not_imported_from(
    home: Path, free_1919: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("ftlaunch", "ftengine", "torch", "json", "msgspec"):
        (repository / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nraise SystemExit(99)\n")
    monkeypatch.chdir(repository)
    wait_ready(start_background(MODEL))
    assert not (tmp_path / "canary").exists()


def test_joining_a_server_that_leaves(home: Path) -> None:
    process = hold_record("leaving", 1.0)
    try:
        record = running()[0]
        record = ServerRecord(**{**record.__dict__, "lease_dir": paths.leases(record.id)})
        assert record.lease_dir is not None
        with join(record):
            assert leases.held(record.lease_dir) == 1
        assert leases.held(record.lease_dir) == 0
        port_path(record.id).unlink()
        with pytest.raises(ServerLeaving):
            join(record)
        assert leases.held(record.lease_dir) == 0
    finally:
        end(process, signal.SIGKILL)


def test_old_logs_are_removed_and_those_in_use_kept(
    home: Path, free_1919: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlaunch.servers.start.LOGS_KEPT", 2)
    logs = paths.private(paths.logs())
    for age in range(5):
        (logs / f"old{age}.log").write_text("")
        os.utime(logs / f"old{age}.log", (1000 - age, 1000 - age))
    record = start_background(MODEL)
    assert record.log is not None
    assert sorted(path.name for path in logs.iterdir()) == sorted(["old0.log", "old1.log", record.log.name])


def test_lease_folders_of_ended_servers_are_removed(home: Path, free_1919: int) -> None:
    """One a launch, for ever, otherwise. A start that holds its lease before it has a record keeps its folder."""
    ended, starting = paths.leases("ended"), paths.leases("starting")
    leases.acquire(ended).release()
    (ended / "1-killed").write_text("")  # what a launch that was killed leaves
    with leases.acquire(starting):
        record = start_background(MODEL)
        assert record.lease_dir is not None
        with join(record):
            assert sorted(path.name for path in starting.parent.iterdir()) == sorted(["starting", record.id])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of another process")
def test_without_ft_home_a_background_server_has_none(
    tmp_path: Path, home: Path, free_1919: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps compiled kernels where `ft serve` in a terminal does: each would compile them anew."""
    monkeypatch.delenv("FT_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    record = start_background(MODEL)
    try:
        assert record.log is not None
        assert record.log.is_relative_to(tmp_path / "ftlaunch")
        assert b"FT_HOME=" not in Path(f"/proc/{record.pid}/environ").read_bytes()
    finally:
        stop(record, patience=1.0)


def test_a_relative_ft_home(tmp_path: Path, home: Path, free_1919: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FT_HOME", "relative")
    record = start_background(MODEL)
    try:
        assert record.log is not None
        assert record.log.is_relative_to(tmp_path / "relative")
    finally:
        stop(record, patience=1.0)
