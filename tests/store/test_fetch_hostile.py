"""Rows 8 and 9: names and links that want to lead out of the store."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.store.filenames import clash, is_safe
from ftlaunch.store.hub.repository import RemoteFile, Repository
from ftlaunch.store.hub.selection import INDEX, choose
from ftlaunch.store.names import hub_name
from ftlaunch.store.wishes import Wishes
from tests.store.hubs import NAME, a_hub, get, models, same
from tests.store.models import model
from tests.support.hub_server import COMMIT, Hub

__all__ = ["a_hub"]

HARM = [
    "../",
    "..",
    "/",
    "//",
    "\\",
    "..\\",
    "\0",
    "C:",
    "CON",
    "nul",
    "COM1",
    "\u2025/",
    "\uff0e\uff0e/",
    "\uff0f",
    "\u2024\u2024/",
    "x" * 300,
    "a//b",
    "./",
    "~/",
    "\n",
    "\x1b[2J",
    "\u202e",
    "\ud800",
    ":",
    "*",
    "|",
    " ",
    ".",
]


def hostile_names(count: int) -> Iterator[str]:
    """Each contains at least one piece that no name may have where it stands."""
    chance = random.Random(8)
    while count:
        place, harm = chance.randrange(3), chance.choice(HARM)
        if place == 0:
            name = f"{harm}model.safetensors" if harm.strip("CONnulM1") else f"{harm}.safetensors"
        elif place == 1:
            name = f"a/{harm}/model.safetensors"
        else:
            name = f"{harm}/{chance.choice(HARM)}/{chance.choice(('config.json', 'm.gguf', 'model.safetensors'))}"
        yield name
        count -= 1


def test_a_thousand_hostile_names() -> None:
    for name in hostile_names(1000):
        assert not is_safe(name), repr(name)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "a/b-00001-of-00002.gguf", "größe.json", "日本語.txt", "README.md"]
)
def test_honest_names(name: str) -> None:
    assert is_safe(name)


def test_names_that_some_disks_cannot_tell_apart() -> None:
    assert clash(["Model.json", "model.json"]) == "model.json"
    assert clash(["a.json", "b.json"]) is None


def test_a_repository_with_a_hostile_name_is_refused() -> None:
    """As a file that is asked for by pattern, and as a shard that the index names; a thousand each."""
    for name in hostile_names(1000):
        wanted = RemoteFile(name, 5, "a" * 64, "")
        index = RemoteFile(INDEX, 5, "b" * 64, "")
        repository = Repository(NAME, COMMIT, "main", "http://127.0.0.1", (wanted, index))
        named = json.dumps({"weight_map": {"x": name}}).encode("utf-8", "surrogatepass")
        for patterns in (("*",), ()):
            with pytest.raises(FtError):
                choose(repository, patterns, "", lambda file, named=named: named)


def test_hostile_listings_write_nothing_outside(a_hub: Hub, ft_home: Path, tmp_path: Path) -> None:
    """Through the whole pull, with the Hub's own client in between."""
    before = sorted(path for path in tmp_path.rglob("*"))
    for number, name in enumerate(hostile_names(60)):
        if "\ud800" in name:
            continue
        files = {"config.json": b"{}", name: b"x"}
        a_hub.add(f"org/m{number}", files)
        with pytest.raises(FtError):
            get(f"org/m{number}", Wishes(files=("*",)))
        with pytest.raises(FtError):
            get(f"org/m{number}")
    assert models(ft_home) == []
    assert [path for path in sorted(tmp_path.rglob("*")) if ft_home not in path.parents and path != ft_home] == before


@pytest.mark.parametrize(
    "typed", ["a//b", "../b/c", "org/..", "CON/x", "org/nul", "a/b/../c.gguf", "a/b@../x", "a--b/c", "a/b/c"]
)
def test_names_that_are_no_repository(typed: str) -> None:
    assert hub_name(typed) is None


PLANTS = [".fetch-org--name", ".partial-org--name", ".old-org--name", "org--name", ".lock-org--name"]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("kind", ["directory", "file", "nothing"])
def test_links_planted_in_the_store(a_hub: Hub, ft_home: Path, tmp_path: Path, plant: str, kind: str) -> None:
    """Replaced or refused, never followed: what they lead to stays as it is."""
    files = model(1000)
    a_hub.add(NAME, files)
    victim = tmp_path / "victim"
    if kind == "directory":
        victim.mkdir()
        (victim / "config.json").write_text("mine")
    elif kind == "file":
        victim.write_text("mine")
    (ft_home / "models").mkdir(parents=True)
    (ft_home / "models" / plant).symlink_to(victim)
    try:
        assert same(get().path, files)
        assert not (ft_home / "models" / "org--name").is_symlink()
    except OSError:
        assert plant.startswith(".lock")
    if kind == "nothing":
        assert not victim.exists()
    elif kind == "file":
        assert victim.read_text() == "mine"
    else:
        assert {path.name: path.read_text() for path in victim.iterdir()} == {"config.json": "mine"}


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
@pytest.mark.parametrize("ending", ["", ".part", ".blocks"])
def test_links_planted_among_the_parts(a_hub: Hub, ft_home: Path, tmp_path: Path, link: object, ending: str) -> None:
    """Under the names that a pull writes to, with the very size that it expects."""
    import hashlib

    files = model(1000)
    name = "model-00001-of-00001.safetensors"
    a_hub.add(NAME, files)
    work = ft_home / "models" / ".fetch-org--name"
    work.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_bytes(b"\0" * len(files[name]))
    assert callable(link)
    link(victim, work / f"{hashlib.sha256(files[name]).hexdigest()}{ending}")
    if (link, ending) == (os.link, ""):
        with contextlib.suppress(FtError):
            get()
        return
    assert same(get().path, files)
    assert victim.read_bytes() == b"\0" * len(files[name])


@pytest.mark.parametrize("pulls", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_links_planted_while_a_pull_runs(a_hub: Hub, ft_home: Path, tmp_path: Path, pulls: int) -> None:
    """Another thread puts links in the place of whatever a pull is about to use. Pulls may fail; nothing gets out."""
    a_hub.add(NAME, model(1000))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    root = ft_home / "models"
    root.mkdir(parents=True)
    over = threading.Event()

    def plant() -> None:
        chance = random.Random(4)
        while not over.wait(0.0005):
            name = chance.choice((".fetch-org--name", ".partial-org--name", ".old-org--name", "org--name"))
            with contextlib.suppress(OSError):
                if chance.random() < 0.5:
                    (root / name).rename(root / f".moved-{chance.random()}")
                (root / name).symlink_to(outside)

    thread = threading.Thread(target=plant)
    thread.start()
    done = 0
    try:
        for _ in range(pulls):
            with contextlib.suppress(FtError, OSError):
                get()
                done += 1
    finally:
        over.set()
        thread.join()
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"mine": "mine"}
    for leftover in root.iterdir():
        if leftover.name != "org--name" and leftover.name.startswith(".moved"):
            leftover.unlink() if leftover.is_symlink() else None
