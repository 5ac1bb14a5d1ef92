"""`ft doctor` as typed, on machines that lack something: memory, rights, network, a home to write to, PyTorch."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftlaunch.cli import docs
from ftlaunch.machine.probe import GROUPS
from ftlaunch.machine.run import QUICK_SECONDS
from ftlaunch.machine.verdict import EXIT, SEVERITY
from tests.support.timing import quickest, seconds

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
COMMAND = [sys.executable, "-m", "ftlaunch", "doctor"]
ROOT = sys.platform == "linux" and os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can make a machine like that")
SGR = re.compile(r"\x1b\[[0-9;]*m")


def doctor(*arguments: str, before: tuple[str, ...] = (), **options: Any) -> tuple[int, str]:
    """Exit status and standard output."""
    done = subprocess.run([*before, *COMMAND, *arguments], capture_output=True, text=True, timeout=60, **options)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def findings(*arguments: str, needs: tuple[str, ...] = (), **options: Any) -> dict[str, dict[str, Any]]:
    """By id, the first of several; the document is checked on the way. needs: groups of which nothing may be unknown:
    where others use the processor, not every probe ends in the short time of --quick.
    """
    deadline = time.monotonic() + 60
    while True:
        by_id = checked(*doctor("--json", *arguments, **options))
        missing = {group for group in needs if f"{group}.answer" in by_id}
        if not missing or time.monotonic() > deadline:
            break
    assert not missing
    return by_id


def checked(status: int, out: str) -> dict[str, dict[str, Any]]:
    document = json.loads(out)
    assert status == document["exit_status"] == EXIT[document["verdict"]]
    worst = max((finding["verdict"] for finding in document["findings"]), key=SEVERITY.__getitem__)
    assert document["verdict"] == worst
    assert document["schema"] == 1
    answers = [finding for finding in document["findings"] if finding["id"].endswith(".answer")]
    assert document["not_known"] == [finding["data"]["probe"] for finding in answers]
    assert not [finding for finding in answers if "ended with status" in finding["value"]], "a probe broke"
    by_id: dict[str, dict[str, Any]] = {}
    for finding in document["findings"]:
        assert set(finding) == {"id", "group", "label", "value", "verdict", "cost", "mend", "data"}
        assert finding["group"] in GROUPS
        assert finding["id"] in documented(), "docs/doctor.md lists every finding"
        by_id.setdefault(finding["id"], finding)
    return by_id


def documented() -> set[str]:
    page = PAGE.read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(\w+\.\w+)`", page, re.MULTILINE)) | {f"{group}.answer" for group in GROUPS}


def test_quick_is_quick(ft_home: Path) -> None:
    assert quickest(lambda: seconds(lambda: doctor("--quick")), quick_limit()) < quick_limit()
    assert not ft_home.exists(), "a command that only looks has made files"


def quick_limit() -> float:
    """The bar is 2 s. Of that, all but the command's own start is bounded by time limits also on a busy machine."""
    start = seconds(lambda: subprocess.run([*COMMAND[:-1], "version"], capture_output=True, check=True))
    return max(2, QUICK_SECONDS + 3 * start)


def test_a_quick_look_at_a_driver_that_hangs(nvidia, ft_home: Path) -> None:
    """In the same time: a warning, and the summary says of what nothing is known."""
    nvidia("hangs", "hangs")
    done: list[subprocess.CompletedProcess[str]] = []

    def look() -> float:
        command = [*COMMAND, "--quick", "--json"]
        return seconds(lambda: done.append(subprocess.run(command, capture_output=True, text=True, timeout=60)))

    assert quickest(look, quick_limit()) < quick_limit()
    deadline = time.monotonic() + 60
    while not (told := told_of_driver(done[-1])) and time.monotonic() < deadline:
        look()  # others use the processor, and the probe had not yet asked the driver
    assert (told["verdict"], told["mend"]) == ("warn", "ft doctor")
    assert "gave no answer within 0.9 s" in told["value"]
    assert told["cost"].startswith("if it hangs, a server waits")
    assert "gpu" in json.loads(done[-1].stdout)["not_known"]
    assert done[-1].returncode >= EXIT["warn"]
    assert re.fullmatch(r".*; not known: .*the GPU.*\.", done[-1].stderr.splitlines()[-1])


def told_of_driver(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found = json.loads(done.stdout)["findings"]
    return next((each for each in found if each["id"] == "gpu.answer" and "driver" in each["value"]), {})


def test_a_pipe_gets_rows_without_control_codes(ft_home: Path) -> None:
    _, out = doctor("--quick")
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["VERDICT", "GROUP", "WHAT", "FOUND", "COSTS", "TRY"]
    assert {len(row) for row in rows} == {6}
    assert {row[0] for row in rows[1:]} <= set(SEVERITY)
    assert not [character for character in out if ord(character) < 32 and character not in "\n\t"]


def on_a_terminal(**environment: str) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", **environment}
    process = subprocess.Popen([*COMMAND, "--quick"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    received = b""
    try:
        while block := os.read(ours, 65536):
            received += block
    except OSError:  # Linux reports the end of a terminal so
        pass
    os.close(ours)
    process.wait()
    return received.decode()


def test_a_terminal_of_80_columns(ft_home: Path) -> None:
    received = on_a_terminal(TERM="xterm", NO_COLOR="")
    assert SGR.search(received), "verdicts have colours"
    lines = SGR.sub("", received).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line in GROUPS.values()] == [
        title for group, title in GROUPS.items() if group != "model"
    ]
    assert "\t" not in received


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_a_terminal_without_colours(environment: dict[str, str], ft_home: Path) -> None:
    assert not SGR.search(on_a_terminal(**environment))


def test_all_findings_are_documented() -> None:
    """Every id that the probes' sources name."""
    sources = (PAGE.parents[1] / "ftlaunch" / "machine").glob("*.py")
    named = {id for path in sources for id in re.findall(r'Finding\(\s*"(\w+\.\w+)"', path.read_text(encoding="utf-8"))}
    assert named - {"gpu.answer"} <= documented()
    assert "ft doctor" in docs.text()


def test_the_demo_fits(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(demo_home))
    found = findings("--quick", "--model", "demo", needs=("memory", "disk", "model"))
    assert {finding["group"] for finding in found.values()} == set(GROUPS)
    assert found["memory.size"]["data"]["usable"] > 0
    assert found["model.memory"]["verdict"] == "ok"
    assert found["model.context"]["data"]["context"] == 8192
    assert found["disk.read"]["data"]["file"].startswith(str(demo_home))


def test_a_home_that_cannot_be_written_to() -> None:
    found = findings("--quick", needs=("disk",), env={**os.environ, "FT_HOME": "/proc/self/ft"})
    assert found["disk.home"]["verdict"] == "bad"


@needs_root
def test_a_disk_that_is_read_only(ft_home: Path) -> None:
    script = 'mount -t tmpfs -o ro none "$1" && shift && exec "$@"'
    ft_home.mkdir()
    before = _unshared("--mount", "sh", "-c", script, "sh", str(ft_home))
    found = findings("--quick", needs=("disk",), before=before)
    assert found["disk.home"]["verdict"] == "bad"


@needs_root
def test_no_network(ft_home: Path) -> None:
    """Not even loopback: nothing is asked of a network, and that a server could not listen is told."""
    found = findings("--quick", needs=("server",), before=_unshared("--net"))
    assert found["server.port"]["verdict"] in ("ok", "bad")


@needs_root
def test_no_rights() -> None:
    """Another user, without a home, who may write nowhere and not look into other processes. All that is left of root
    is that it may read this Python, wherever that lies.
    """
    program = shutil.which("setpriv")
    if program is None:
        pytest.skip("there is no setpriv")
    nobody = ("--reuid=65534", "--regid=65534", "--clear-groups")
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    before = (program, *nobody, *reading)
    if subprocess.run([*before, sys.executable, "-c", ""], capture_output=True, cwd="/").returncode:
        pytest.skip("another user cannot run this Python")
    environment = {name: value for name, value in os.environ.items() if name not in ("FT_HOME", "HOME")}
    environment |= {"HOME": "/nonexistent"}
    found = findings("--quick", needs=("disk", "memory"), before=before, cwd="/", env=environment)
    assert found["disk.home"]["verdict"] == "bad"
    assert found["disk.read"]["data"]["bytes_per_second"] is None
    assert found["memory.size"]["data"]["usable"] > 0


@needs_root
def test_a_cgroup_of_512_megabytes(ft_home: Path) -> None:
    """Everything, with the measurements: they are left out or made smaller, and nothing is killed."""
    folder = next(filter(Path.is_dir, (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))), None)
    if folder is None:
        pytest.skip("there are no cgroups")
    box = folder / f"ft-doctor-{os.getpid()}"
    try:
        box.mkdir()
        limit = next(path for name in ("memory.limit_in_bytes", "memory.max") if (path := box / name).exists())
        limit.write_text(str(512 << 20))
    except (OSError, StopIteration):
        shutil.rmtree(box, ignore_errors=True)
        pytest.skip("no cgroup with a memory limit can be made")
    try:
        enter = f'echo $$ > {box}/cgroup.procs && exec "$@"'
        found = findings(needs=("memory",), before=("sh", "-c", enter, "sh"))
    finally:
        _remove(box)
    assert found["memory.size"]["verdict"] == "bad"
    assert "512 MiB" in found["memory.size"]["value"] or "cgroup" in found["memory.size"]["value"]
    assert found["memory.read"]["verdict"] in ("ok", "note")


def test_without_torch(ft_home: Path, tmp_path: Path) -> None:
    """A Python that finds neither the package nor its metadata, also in the processes that probes run in."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m, sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = sys.modules['numpy'] = None\n"
        "real = m.Distribution.from_name.__func__\n"
        "def from_name(cls, name):\n"
        "    if name in ('torch', 'triton', 'numpy'):\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return real(cls, name)\n"
        "m.Distribution.from_name = classmethod(from_name)\n"
    )
    found = findings("--quick", needs=("software", "memory"), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found["software.torch"]["verdict"] == "bad"
    assert "torch is missing" in found["software.needs"]["value"]
    assert found["memory.size"]["verdict"] in ("ok", "note", "warn")


def test_ctrl_c_ends_it_at_once(nvidia, ft_home: Path) -> None:
    """Also while a driver hangs, and nothing that was started stays."""
    nvidia("hangs", "hangs")

    def interrupted() -> float:
        process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Looking at this machine")
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        return time.monotonic() - began

    assert quickest(interrupted, 2) < 2


@pytest.mark.slow
def test_everything_in_15_seconds(nvidia, ft_home: Path) -> None:
    """With a driver that hangs in every call, which takes its whole time limit."""
    nvidia("hangs", "hangs")
    began = time.monotonic()
    status, out = doctor("--json")
    assert time.monotonic() - began < 15
    assert status == EXIT["bad"]
    found = {finding["id"]: finding for finding in json.loads(out)["findings"]}
    assert "hangs" in found["gpu.answer"]["value"]
    assert "gpu" in json.loads(out)["not_known"]
    assert found["memory.read"]["data"]["bytes_per_second"] > 1e9


def _unshared(*arguments: str) -> tuple[str, ...]:
    program = shutil.which("unshare")
    kind = arguments[0]
    if program is None or subprocess.run([program, kind, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of that kind can be made here")
    return (program, *arguments)


def _remove(box: Path) -> None:
    for _ in range(50):  # until the last process has left
        try:
            box.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
