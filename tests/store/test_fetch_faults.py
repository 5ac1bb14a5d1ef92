"""Row 2 of the fault list: a network that misbehaves, ten times of each kind. A pull finishes or says why; the files
are never wrong, and the pull after a failed one completes.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.store.events import Event, Said
from ftlaunch.store.hub.errors import HubError
from ftlaunch.store.hub.limits import Limits
from tests.store.hubs import IMPATIENT, NAME, QUICK, a_hub, get, models, same, within
from tests.store.models import model
from tests.support.hub_server import Hub

__all__ = ["a_hub"]

KINDS = [
    "reset",
    "stall",
    "truncated",
    "trickle",
    "416",
    "429",
    "500",
    "503",
    "403",
    "404",
    "another version",
    "wrong range",
    "short range",
    "no range",
    "compressed",
    "flipped bit",
]
SHARDS = (9 << 20, 17 << 20, 5 << 20)  # ten spans of at most 4 MiB


def limits(kind: str) -> Limits:
    """Only what never comes is worth a short patience: a busy machine answers late."""
    return IMPATIENT if kind in ("stall", "trickle") else QUICK


class Faults:
    """`kind` for the first `times` requests that ask for file content at a place not asked for before."""

    def __init__(self, kind: str, times: int) -> None:
        self.kind = kind
        self.left = times
        self.met: Counter[tuple[str, int]] = Counter()
        self.lock = threading.Lock()

    def __call__(self, blob: str, start: int) -> str | None:
        with self.lock:
            self.met[blob, start] += 1
            if self.left and self.met[blob, start] == 1:
                self.left -= 1
                return self.kind
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_ten_faults_of_a_kind(a_hub: Hub, ft_home: Path, kind: str) -> None:
    files = model(*SHARDS)
    a_hub.add(NAME, files)
    faults = a_hub.cdn.fault = Faults(kind, 10)
    with within(60):
        try:
            assert same(get(limits=limits(kind)).path, files)
        except HubError:
            assert "org--name" not in models(ft_home)
            faults.left = 0
            assert same(get().path, files)
    assert faults.left == 0
    assert models(ft_home) == ["org--name"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_stays_ends_with_a_sentence(a_hub: Hub, ft_home: Path, kind: str) -> None:
    """Within the stated number of attempts. What cannot be told from the listing never bears the model's name."""
    files = model(5 << 20)
    a_hub.add(NAME, files)
    chance = random.Random(kind)
    a_hub.cdn.fault = lambda blob, start: kind if start or chance.random() < 0.99 else None
    if kind == "another version":  # only announced: the content stays, so that the hash decides
        assert same(get().path, files)
        return
    with within(30), pytest.raises(FtError) as caught:
        get(limits=limits(kind))
    assert caught.value.next_step
    assert models(ft_home) in ([], [".fetch-org--name"])
    a_hub.cdn.fault = lambda blob, start: None
    assert same(get().path, files)
    assert models(ft_home) == ["org--name"]


def test_a_long_wait_is_said_and_not_waited(a_hub: Hub) -> None:
    a_hub.add(NAME, model(5 << 20))
    a_hub.cdn.fault = lambda blob, start: "wait an hour"
    with within(30), pytest.raises(FtError, match="asks to wait 3600 seconds"):
        get()


def test_content_that_never_fits_its_hash_is_fetched_twice_and_not_kept(a_hub: Hub, ft_home: Path) -> None:
    files = model(6 << 20, 1000)
    name = "model-00001-of-00002.safetensors"
    repo = a_hub.add(NAME, files)
    wrong = bytearray(files[name])
    wrong[-5] ^= 1
    a_hub.cdn.blobs[a_hub.blob_name(repo, name)] = bytes(wrong)
    seen: list[Event] = []
    with pytest.raises(FtError, match=f"{name}: its content does not fit the hash .* again after it was fetched anew"):
        get(seen=seen)
    assert sum(isinstance(event, Said) and "fetched anew" in event.text for event in seen) == 1
    assert "org--name" not in models(ft_home)
    work = ft_home / "models" / ".fetch-org--name"
    assert not work.is_dir() or all(
        path.stat().st_size != len(wrong) for path in work.iterdir() if "." not in path.name
    )


def test_a_small_file_that_does_not_fit_its_git_hash(a_hub: Hub, ft_home: Path) -> None:
    files = model(1000)
    repo = a_hub.add(NAME, files)
    repo.listed = {"tokenizer.json": files["tokenizer.json"].replace(b"0", b"1")}
    with pytest.raises(FtError, match=r"tokenizer\.json: its content does not fit"):
        get()
    assert "org--name" not in models(ft_home)


def test_a_revision_that_moves_while_it_is_fetched_mixes_nothing(a_hub: Hub) -> None:
    """Files are asked for by commit; when the Hub answers with another one, that is no file of this model."""
    a_hub.add(NAME, model(5 << 20, 5 << 20))
    listing = a_hub.repos[NAME].siblings()
    moved = a_hub.add(NAME, model(5 << 20, 5 << 20, seed=5), commit="e" * 40)
    moved.siblings = lambda: listing  # type: ignore[method-assign]
    with pytest.raises(FtError):
        get()


def test_half_a_file_is_not_fetched_again(a_hub: Hub) -> None:
    """An error, then a pull: only what is missing crosses the wire."""
    files = model(40 << 20)
    a_hub.add(NAME, files)
    one = Limits(timeout=20, attempts=2, first_wait=0.01, connections=1)
    a_hub.cdn.fault = lambda blob, start: "503" if start >= 20 << 20 else None
    with pytest.raises(FtError, match="HTTP 503"):
        get(limits=one)
    a_hub.cdn.fault = lambda blob, start: None
    a_hub.cdn.sent = 0
    assert same(get(limits=QUICK).path, files)
    assert a_hub.cdn.sent < 25 << 20
