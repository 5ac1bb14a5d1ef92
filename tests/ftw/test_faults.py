"""What a conversion leaves behind when it is killed, when the disk fails, when two run, when names are planted."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftengine.errors import CheckpointError, FtError
from ftengine.weights.convert import convert as module
from ftengine.weights.convert import destination
from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw.header import read_header
from ftengine.weights.ftw.layout import Origin
from ftengine.weights.ftw.verify import verify

ROOT = Path(__file__).resolve().parents[2]
ORIGIN = Origin("x")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_at(model: Path, tmp_path: Path, rounds: int, seed: int) -> tuple[int, int]:
    out = tmp_path / "work" / "out"
    out.parent.mkdir()
    arguments = [sys.executable, "-m", "tests.ftw.crash", str(model), str(out), str(rounds), str(seed)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    killed, renewed = map(int, done.stdout.split())
    return killed, renewed


def test_killed_at_random_points(model: Path, tmp_path: Path) -> None:
    """The old one or the new one, whole; and the next run removes what was left."""
    killed, _ = killed_at(model, tmp_path, rounds=8, seed=1)
    assert killed > 2


@pytest.mark.slow
def test_killed_at_fifty_random_points(model: Path, tmp_path: Path) -> None:
    killed, renewed = killed_at(model, tmp_path, rounds=50, seed=2)
    assert killed > 25
    assert renewed > 0


class Failing:
    """Lets `left` calls of a system call pass, then each fails."""

    def __init__(self, real: Callable[..., int], left: int, code: int) -> None:
        self._real, self._code = real, code
        self._passes = threading.Semaphore(left)
        self.failed = False

    def __call__(self, *arguments: object) -> int:
        if self._passes.acquire(blocking=False):
            return self._real(*arguments)
        self.failed = True
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_the_nth_call_fails(
    model: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Every n until a conversion gets through: a sentence, the old directory as it was, nothing beside it."""
    out = tmp_path / "work" / "out"
    shutil.copytree(converted, out)
    before = tree(out)
    for left in range(200):
        failing = Failing(getattr(os, call), left, code)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            error = attempt(model, out)
        if error is None:
            assert not failing.failed
            break
        assert str(tmp_path) in str(error)
        assert ("no space is left" in str(error)) == (code == errno.ENOSPC)
        assert error.next_step
        # The last fsync is of the folder, after the new directory got its name.
        assert tree(out) == before or (call == "fsync" and verify(out) == [])
        assert names(out.parent) == ["out"]
    assert left >= 2
    assert verify(out) == []


def attempt(model: Path, out: Path) -> FtError | None:
    try:
        convert(model, out, Options(), ORIGIN)
    except FtError as error:
        return error
    return None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before anything is written; and when that is not asked, while it is."""
    with pytest.raises(FtError, match="GB free, the conversion writes"):
        convert(model, small_disk / "out", Options(experts="bf16"), ORIGIN)
    assert names(small_disk) == []
    monkeypatch.setattr(module, "check_space", lambda folder, needed: None)
    with pytest.raises(FtError, match="no space is left"):
        convert(model, small_disk / "out", Options(experts="bf16"), ORIGIN)
    assert names(small_disk) == []
    assert shutil.disk_usage(small_disk).used == 0


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    """The second waits for the first, says for whom, and then writes its own."""
    out, said, waiting = tmp_path / "out", [], threading.Event()

    def wait(text: str) -> None:
        said.append(text)
        waiting.set()

    second = threading.Thread(
        target=convert, args=(model, out, Options(experts="bf16"), ORIGIN), kwargs={"on_wait": wait}
    )
    with destination.destination(out) as place:
        (place.partial / "something").write_bytes(b"")
        second.start()
        assert waiting.wait(60)
        assert (place.partial / "something").exists()
    second.join()
    assert said == [f"Waiting for process {os.getpid()}, which is writing {out}"]
    assert verify(out) == []
    assert names(tmp_path) == ["out"]


def test_many_at_once(model: Path, tmp_path: Path) -> None:
    out, failed = tmp_path / "out", []

    def run(experts: str) -> None:
        try:
            convert(model, out, Options(experts=experts), ORIGIN)
            assert verify(out, threads=1) == []
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(experts,)) for experts in ("keep", "bf16", "mxfp4") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Another one may replace the directory while one checks it, which the check then says; nothing else may happen.
    assert all(isinstance(error, CheckpointError | AssertionError) for error in failed), failed
    assert verify(out) == []
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(destination, "exchange", lambda one, other: False)
    out = tmp_path / "out"
    first = convert(model, out, Options(), ORIGIN)
    second = convert(model, out, Options(experts="bf16"), ORIGIN)
    assert first != second == read_header(out)
    assert verify(out) == []
    assert names(tmp_path) == ["out"]


def test_killed_between_two_renames(model: Path, converted: Path, tmp_path: Path) -> None:
    """Where names cannot be exchanged there is a moment with the old one aside: the next run puts it back first."""
    out = tmp_path / "out"
    shutil.copytree(converted, tmp_path / ".out.ft-old")
    with pytest.raises(CheckpointError):
        convert(tmp_path / "nothing", out, Options(), ORIGIN)
    with destination.destination(out):
        assert tree(out) == tree(converted)
    assert names(tmp_path) == ["out"]
    convert(model, out, Options(), ORIGIN)
    assert verify(out) == []


def test_what_must_not_be_replaced(model: Path, converted: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    shutil.copytree(converted, tmp_path / "mixed")
    (tmp_path / "mixed" / "thesis.txt").write_text("mine")
    (tmp_path / "damaged").mkdir()
    for name in ("ftw.json", "thesis.odt"):
        (tmp_path / "damaged" / name).write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("file", "folder", "mixed", "damaged", "link", "dangling", "nowhere/out", "file/out"):
        with pytest.raises(FtError) as caught:
            convert(model, tmp_path / name, Options(), ORIGIN)
        assert caught.value.next_step, name
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (tmp_path / "link").is_symlink()
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_the_folder_above_may_be_a_link(model: Path, tmp_path: Path) -> None:
    """What the user names is the user's choice; only what stands at the output itself is not followed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert attempt(model, tmp_path / "link" / "out") is None
    assert verify(tmp_path / "real" / "out") == []
    assert names(tmp_path / "real") == ["out"]


def test_a_damaged_one_is_replaced(model: Path, copy: Callable[[], Path]) -> None:
    out = copy()
    (out / "ftw.json").write_bytes(b"{}")
    convert(model, out, Options(), ORIGIN)
    assert verify(out) == []


@pytest.mark.parametrize("role", ["partial", "old", "lock"])
@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_planted_links_are_not_followed(model: Path, tmp_path: Path, role: str, target: str) -> None:
    """Where the conversion keeps its own things: they are removed or refused, what they point to is as it was."""
    place, victim = tmp_path / "place", tmp_path / "victim"
    place.mkdir()
    if target == "folder":
        victim.mkdir()
        (victim / "ftw.json").write_text("mine")
    elif target == "file":
        victim.write_text("mine")
    (place / f".out.ft-{role}").symlink_to(victim)
    error = attempt(model, place / "out")
    if error is None:
        assert verify(place / "out") == []
    else:
        assert role == "lock"
        assert error.next_step
    if target == "folder":
        assert tree(victim) == {"ftw.json": b"mine"}
    elif target == "file":
        assert victim.read_text() == "mine"
    else:
        assert not os.path.lexists(victim)


def test_a_thousand_races_at_the_output(tmp_path: Path) -> None:
    """Somebody keeps planting a link at the output's name: what it points to never changes."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("mine")
    stop = threading.Event()

    def plant() -> None:
        while not stop.is_set():
            try:
                out.symlink_to(victim)
            except OSError:
                shutil.rmtree(out, ignore_errors=True)  # leaves links alone
                with contextlib.suppress(OSError):
                    out.unlink()

    planter = threading.Thread(target=plant)
    planter.start()
    try:
        for _ in range(1000):
            try:
                with destination.destination(out) as place:
                    (place.partial / "ftw.json").write_text("{}")
                    place.commit()
            except FtError:
                pass
            assert names(victim) == ["mine"]
    finally:
        stop.set()
        planter.join()


def test_a_source_that_ends_early(model: Path, converted: Path, tmp_path: Path) -> None:
    """Cut while it is converted: a sentence that names the file, and the old directory stays."""
    source, out = tmp_path / "source", tmp_path / "work" / "out"
    shutil.copytree(model, source)
    shutil.copytree(converted, out)
    before = tree(out)
    weights = source / "model.safetensors"

    def cut(stage: str, done: float) -> None:
        if done == 0:
            os.truncate(weights, weights.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        convert(source, out, Options(), ORIGIN, cut)
    assert tree(out) == before
    assert names(out.parent) == ["out"]


@pytest.mark.parametrize("changed", ["dense-00001.ftw", "experts-00001.ftw"])
def test_verify_finds_what_the_disk_did(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A bit that turns after it was written: --verify says so, and nothing takes the output's place."""
    real = module.write_header

    def and_turn_a_bit(folder: Path, header: Any) -> None:
        real(folder, header)
        with (folder / changed).open("r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))

    monkeypatch.setattr(module, "write_header", and_turn_a_bit)
    with pytest.raises(CheckpointError, match=changed.replace(".", r"\.")):
        convert(model, tmp_path / "out", Options(verify=True), ORIGIN)
    assert names(tmp_path) == []
    convert(model, tmp_path / "out", Options(), ORIGIN)
    assert verify(tmp_path / "out") != []


def test_compare_finds_what_hashes_cannot(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was wrong before it was hashed."""
    from ftengine.weights.convert import units

    real, wrong = units.requantized, "layers.1.mlp.experts.2.up_proj.weight"

    def requantized(matrix: Any, form: Any, name: str, deviation: Any = None) -> Any:
        result = real(matrix, form, name, deviation)
        if name == wrong:
            result.codes[7, 5] ^= 1
        return result

    monkeypatch.setattr(units, "requantized", requantized)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight was not written"):
        convert(model, tmp_path / "out", Options(experts="mxfp4", verify=True), ORIGIN)
