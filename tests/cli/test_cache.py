"""`ft cache` over folders as servers write them, and over what others put there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ftengine.api.answers import answers_path
from ftengine.cache.tiers.format import MAGIC, START, VERSION, Header
from ftengine.cache.tiers.identity import Identity
from ftengine.config import EngineConfig
from ftengine.core import BoundaryKind
from ftlaunch import paths
from ftlaunch.cli import main
from ftlaunch.servers import start_background, stop, wait_ready
from tests.store import small_models
from tests.support.serving import SCRIPTED_CHECKPOINT, scripted_environment

HOUR = 3600.0


def identity(model: str, weights: str = "w") -> Identity:
    return Identity(model, weights, "bfloat16", "cuda", "layout", 16, "template", "tokenizer", "1.2.3")


def key_folder(made: Identity) -> Path:
    """With its key.json."""
    folder = paths.prompts() / made.key
    folder.mkdir(mode=0o700, parents=True)
    (folder / "key.json").write_bytes(made.encode())
    return folder


def record(folder: Path, number: int, session: str, size: int, age: float) -> Path:
    """A file in the tiers' format; age: seconds since it was used."""
    key = bytes([number]) * 16
    header = Header(
        VERSION,
        folder.name,
        key,
        b"\0" * 16,
        b"",
        512,
        BoundaryKind.SYSTEM,
        session,
        False,
        False,
        0,
        0,
        size,
        b"0" * 32,
    )
    raw = msgspec.msgpack.encode(header)
    path = folder / f"{512:08x}-chunk-{key.hex()}"
    path.write_bytes(START.pack(MAGIC, len(raw), hashlib.sha256(raw).digest()) + raw + b"x" * size)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def answers(model_dir: Path | str, text: str = "written") -> Path:
    path = answers_path(EngineConfig(str(model_dir), cache_dir=str(paths.prompts())))
    assert path is not None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def kept(ft_home: Path) -> Path:
    """Two sessions of `demo`, one record of another model, answers of the demo and of a path."""
    demo = key_folder(identity("demo"))
    record(demo, 1, "a", 4_000_000, HOUR)
    record(demo, 2, "b", 1_000_000, 30)
    record(demo, 3, "a", 1_000_000, 50 * HOUR)
    record(key_folder(identity("/models/other", "other")), 1, "c", 2_000_000, 24 * HOUR)
    answers(ft_home / "models" / "demo")
    answers("/models/other")
    return paths.prompts()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["cache", *arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out, said.err


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


def test_what_is_shown(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shown(capsys)
    assert data == shown(capsys, "show")
    demo, other = data["prompts"]
    assert (demo["model"], demo["records"], demo["sessions"], other["model"]) == ("demo", 3, 2, "/models/other")
    assert demo["bytes"] == sum(path.stat().st_size for path in (kept / demo["key"]).iterdir())
    assert abs(time.time() - 30 - demo["last_used"]) < 60
    assert abs(time.time() - 50 * HOUR - demo["oldest"]) < 60
    assert demo["identity"]["version"] == "1.2.3"
    assert data["answers"] == {"files": 2, "bytes": 14}
    assert data["bytes"] == sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    assert data["folder"] == str(kept)
    status, out, err = run(capsys)
    assert status == 0
    head, first, second = (line.split("\t") for line in out.splitlines())
    assert head == ["MODEL", "SIZE", "SESSIONS", "USED", "SINCE", "MADE WITH"]
    assert first == ["demo", "6.0 MB", "2", "now", "2d ago", "bfloat16, cuda, ft 1.2.3"]
    assert second[:4] == ["/models/other", "2.0 MB", "1", "1d ago"]
    assert "Answers as the models wrote them: 14 B." in err
    assert f"8.0 MB in {kept}. Remove it: ft cache clear" in err


def test_of_one_model(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shown(capsys, "--model", "demo")
    assert [each["model"] for each in data["prompts"]] == ["demo"]
    assert data["answers"]["files"] == 1
    assert shown(capsys, "--model", "/models/other")["answers"]["files"] == 1
    status, out, err = run(capsys, "--model", "qwen3.6-35b-a3b")
    assert (status, out) == (0, "")
    assert f"Nothing is kept of qwen3.6-35b-a3b in {kept}." in err


def test_clear_of_one_model(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one stays as it was, byte for byte."""
    other = {path: path.read_bytes() for path in (kept / identity("/models/other", "other").key).iterdir()}
    freed = shown(capsys, "clear", "--model", "demo", "--yes")["freed"]
    assert freed > 6_000_000
    assert not (kept / identity("demo").key).exists()
    assert {path: path.read_bytes() for path in other} == other
    assert shown(capsys)["answers"]["files"] == 1


def test_clear_of_all(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shown(capsys)["bytes"]
    assert shown(capsys, "clear", "--yes") == {"freed": before}
    assert [path.name for path in kept.iterdir()] == []
    assert shown(capsys)["bytes"] == 0
    assert run(capsys, "clear", "--yes") == (0, f"Nothing is kept in {kept}.\n", "")


def test_nobody_to_ask(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shown(capsys)
    status, out, err = run(capsys, "clear")
    assert (status, out) == (1, "")
    assert err == "Error: nothing was removed: there is nobody to ask\nTry:   ft cache clear --yes\n"
    assert shown(capsys) == before


@pytest.mark.parametrize(("answer", "left"), [("n", True), ("y", False)])
def test_asked_first(
    answer: str, left: bool, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlaunch.cli.cache._is_terminal", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: answer)
    status, _, _ = run(capsys, "clear")
    assert status == 0
    assert (kept / identity("demo").key).exists() is left


def test_nothing_is_there_and_nothing_is_made(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert (status, out) == (0, "")
    assert err == f"Nothing is kept in {ft_home / 'cache' / 'prompts'}.\n"
    assert run(capsys, "clear", "--yes")[0] == 0
    assert not ft_home.exists()


def test_links_are_removed_and_never_followed(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted for what ours are called: a folder, a record, a file of answers."""
    outside = tmp_path / "outside"
    record(key_folder(identity("victim", "v")), 1, "a", 10, 0)
    (kept / identity("victim", "v").key).rename(outside)
    (outside / "precious").write_text("mine")
    (kept / ("0" * 32)).symlink_to(outside)
    (kept / identity("demo").key / ("f" * 8 + "-tail-" + "f" * 32)).symlink_to(outside / "precious")
    (kept / ("answers-" + "0" * 16)).symlink_to(outside / "precious")
    assert {each["model"] for each in shown(capsys)["prompts"]} == {"demo", "/models/other"}
    assert run(capsys, "clear", "--yes")[0] == 0
    assert {path.name for path in outside.iterdir()} >= {"precious", "key.json"}
    assert (outside / "precious").read_text() == "mine"
    assert not (kept / identity("demo").key).exists()


def test_what_is_not_ours_stays(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept / "notes").mkdir()
    (kept / "notes" / "file").write_text("mine")
    (kept / "answers-of-mine").write_text("mine")
    assert run(capsys, "clear", "--yes")[0] == 0
    assert sorted(path.name for path in kept.iterdir()) == ["answers-of-mine", "notes"]


def test_broken_contents(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No key.json, and records that tell nothing: shown for what they take, and removed."""
    folder = paths.prompts() / ("ab" * 16)
    folder.mkdir(parents=True)
    for number, content in enumerate([b"", b"x", b"FTPROMPT" + b"\xff" * 100, os.urandom(5000)]):
        (folder / f"{512:08x}-tail-{number:032x}").write_bytes(content)
    (each,) = shown(capsys)["prompts"]
    assert (each["model"], each["records"], each["sessions"], each["bytes"]) == (None, 4, 0, 5109)
    assert run(capsys)[1].splitlines()[1].startswith("(not known)\t5.1 kB\t0\t")
    assert shown(capsys, "clear", "--yes")["freed"] == 5109
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("arguments", [["show"], ["clear", "--yes"]])
def test_of_another_user(arguments: list[str], kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chown(kept, 65534, 65534)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"Error: {kept} cannot be read or written by this user\nTry:   set FT_HOME")
    assert (kept / identity("demo").key).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_part_of_another_user(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, and nothing is called removed that is still there."""
    folder = kept / identity("demo").key
    os.chown(folder, 65534, 65534)
    assert shown(capsys)["unreadable"] == [str(folder)]
    assert f"{folder} cannot be read." in run(capsys)[2]
    status, out, err = run(capsys, "clear", "--yes")
    assert (status, out) == (1, "")
    assert err.startswith(f"Error: {folder} cannot be read, so nothing was removed\nTry:   rm -r {folder}")


def test_beside_a_running_server(
    ft_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files go while it uses them: it answers as before, and writes what comes next into a new folder."""
    for name, value in scripted_environment(ft_home).items():
        monkeypatch.setenv(name, value)
    server = start_background(str(SCRIPTED_CHECKPOINT), leased=False)
    try:
        wait_ready(server)

        def records(word: str) -> int:
            """After a prompt that is as long as it takes for one to be written."""
            body = {"messages": [{"role": "user", "content": f"{word} " * 1500}], "max_tokens": 2}
            headers = {"Authorization": f"Bearer {server.api_key}"}
            url = f"{server.url}/v1/chat/completions"
            httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).raise_for_status()
            found, deadline = 0, time.monotonic() + 90  # a write that meets the removal is tried again after 30 s
            while not found and time.monotonic() < deadline:
                found = sum(each["records"] for each in shown(capsys, "--model", str(SCRIPTED_CHECKPOINT))["prompts"])
            return found

        assert records("one") > 0
        assert shown(capsys, "clear", "--yes")["freed"] > 0
        assert shown(capsys)["prompts"] == []
        assert records("two") > 0
        assert server.log is not None
        log = server.log.read_text()
    finally:
        stop(server)
    assert "Traceback" not in log
    assert " E " not in log


def test_a_removed_model_takes_its_prompts_along(kept: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_models.store(ft_home, "mine")
    record(key_folder(identity("mine", "mine")), 1, "a", 3_000_000, 0)
    answers(ft_home / "models" / "mine")
    model = sum(path.stat().st_size for path in (ft_home / "models" / "mine").rglob("*"))
    assert main(["rm", "mine", "--yes", "--json"]) == 0
    removed = json.loads(capsys.readouterr().out)
    assert removed["freed"] > 3_000_000
    assert removed["freed"] < 3_000_000 + model + 10_000
    left = shown(capsys)
    assert [each["model"] for each in left["prompts"]] == ["demo", "/models/other"]
    assert left["answers"]["files"] == 2
