"""Files that are not what they should be: damaged, planted, of others, or gone. Nothing of them reaches the device."""

from __future__ import annotations

import logging
import os
import random
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from ftengine.cache.tiers.identity import Identity
from ftengine.core import BoundaryKind
from tests.cache.tiers.device import ATTENTION, HYBRID, IDENTITY, Bench, open_bench, prompt

TOKENS = prompt(1300)
PLACES = (400, 900, 1300)


def filled(folder: Path, identity: Identity = IDENTITY) -> None:
    """Three anchors and two chunks on disk."""
    bench = opened(folder, identity)
    for place in PLACES:
        bench.keep(TOKENS[:place], BoundaryKind.SYSTEM)
    bench.written()
    bench.close()


def opened(folder: Path, identity: Identity = IDENTITY, host: int = 64 << 20) -> Bench:
    return open_bench(HYBRID, host, 64 << 20, folder, identity)


def records(folder: Path, identity: Identity = IDENTITY) -> list[Path]:
    return sorted(path for path in (folder / identity.key).iterdir() if path.name != "key.json")


def test_two_hundred_bit_flips(tmp_path: Path) -> None:
    """Each in a file of its own run: what is restored is right, and the damaged file is seen and removed."""
    chance = random.Random(0)
    filled(tmp_path / "sound")
    names = [path.name for path in records(tmp_path / "sound")]
    assert len(names) == 5
    for number in range(200):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "sound", folder)
        victim = chance.choice(records(folder))
        content = bytearray(victim.read_bytes())
        place = chance.randrange(8 * len(content))
        if number % 4 == 0:  # most of a file is content: headers get their share, too
            place = chance.randrange(8 * 400)
        content[place // 8] ^= 1 << place % 8
        victim.write_bytes(content)
        bench = opened(folder)
        reached = None
        for limit in (1300, *PLACES):  # the deepest first, then so that every file is read
            if reached is not None and bench.tiers.sizes()[1].failures:
                break
            found = bench.find(TOKENS, limit)
            if found is not None:
                ticket = bench.restore(TOKENS, found)
                reached = ticket.tokens if reached is None else reached
                if ticket.tokens:
                    bench.check_restored(TOKENS, ticket)
        assert bench.tiers.sizes()[1].failures >= 1, f"{victim.name}, bit {place}"
        assert not victim.exists()
        expected = max((place for place in PLACES if victim.name not in needed(names, place)), default=0)
        assert (reached or 0) == expected
        bench.close()
        shutil.rmtree(folder)


def needed(names: list[str], place: int) -> list[str]:
    """The files that a restore to `place` reads."""
    chunks = [name for name in names if "-chunk-" in name][: place // 512]
    tail = [name for name in names if "-tail-" in name][PLACES.index(place)]
    return [*chunks, tail]


def test_truncated_and_grown(tmp_path: Path) -> None:
    filled(tmp_path)
    for change in (lambda size: 0, lambda size: 20, lambda size: size - 1, lambda size: size + 1):
        folder = tmp_path / "copy"
        shutil.copytree(tmp_path / IDENTITY.key, folder / IDENTITY.key)
        for path in records(folder):
            os.truncate(path, change(path.stat().st_size))
        bench = opened(folder)
        assert bench.find(TOKENS) is None
        assert records(folder) == []
        bench.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("field", [name for name in msgspec.structs.asdict(IDENTITY) if name != "model"])
def test_of_another_identity(field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Never found, whether they lie in their own folder or were put into this one's."""
    caplog.set_level(logging.INFO)
    value = getattr(IDENTITY, field)
    other = msgspec.structs.replace(IDENTITY, **{field: value + 1 if isinstance(value, int) else value + "x"})
    filled(tmp_path, other)
    bench = opened(tmp_path)
    assert bench.find(TOKENS) is None
    assert "are not used: model with another" in caplog.text or "are not used: model with other" in caplog.text
    bench.close()
    for path in records(tmp_path, other):
        shutil.copy(path, tmp_path / IDENTITY.key / path.name)
    bench = opened(tmp_path)
    assert bench.find(TOKENS) is None
    assert records(tmp_path) == []
    assert "another model, template, tokenizer, dtype or version made it" in caplog.text
    bench.close()
    assert len(records(tmp_path, other)) == 5
    bench = opened(tmp_path, other)
    assert bench.find(TOKENS) is not None
    bench.close()


def test_another_model_of_the_same_identity_field_by_field() -> None:
    """The name for people says nothing of the content."""
    assert msgspec.structs.replace(IDENTITY, model="renamed").key == IDENTITY.key


def test_a_record_under_another_ones_name(tmp_path: Path) -> None:
    filled(tmp_path)
    files = records(tmp_path)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    bench = opened(tmp_path)
    assert bench.find(TOKENS) is None
    bench.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither where a record, a draft, the lock nor the identity's folder should be."""
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_bytes(b"secret")
    folder = tmp_path / "prompts"
    filled(folder)
    moved = {}
    for path in records(folder):
        moved[path.name] = outside / path.name
        path.rename(outside / path.name)
        path.symlink_to(outside / path.name)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    (folder / IDENTITY.key / "key.json").unlink()
    (folder / IDENTITY.key / "key.json").symlink_to(secret)
    os.mkfifo(folder / IDENTITY.key / f"{5:08x}-tail-{'0' * 32}")
    bench = opened(folder)
    assert bench.find(TOKENS) is None
    bench.keep(TOKENS)
    bench.written()
    bench.close()
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    assert all(path.is_file() and not path.is_symlink() for path in (folder / IDENTITY.key).glob("*key.json"))


def test_a_link_where_the_folder_should_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / IDENTITY.key).symlink_to(outside)
    bench = opened(folder)
    bench.keep(TOKENS)
    bench.close()
    assert list(outside.iterdir()) == []
    assert "prompts are not kept on disk" in caplog.text


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_modes_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        filled(tmp_path / "made" / "prompts")
    finally:
        os.umask(before)
    check_private(tmp_path / "made" / "prompts")


def test_an_open_folder_is_closed_to_others(tmp_path: Path) -> None:
    filled(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / IDENTITY.key).chmod(0o777)
    bench = opened(tmp_path)
    bench.close()
    check_private(tmp_path)


def check_private(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_files_that_vanish(tmp_path: Path) -> None:
    """`ft cache clear` beside a running server: what was found is not restored, and writing goes on."""
    filled(tmp_path)
    bench = opened(tmp_path)
    found = bench.find(TOKENS)
    assert found is not None
    shutil.rmtree(tmp_path / IDENTITY.key)
    ticket = bench.restore(TOKENS, found)
    assert ticket.tokens == 0
    assert ticket.reason
    assert bench.find(TOKENS) is None
    bench.keep(TOKENS)
    bench.written()
    bench.close()
    assert len(records(tmp_path)) == 3
    check_private(tmp_path)
    bench = opened(tmp_path)
    found = bench.find(TOKENS)
    assert found is not None
    assert found.tokens == 1300
    bench.close()


def test_without_states_the_sound_beginning_is_restored(tmp_path: Path) -> None:
    bench = open_bench(ATTENTION, 64 << 20, 64 << 20, tmp_path)
    bench.keep(TOKENS)
    bench.close()
    last = records(tmp_path)[1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    bench = open_bench(ATTENTION, 64 << 20, 64 << 20, tmp_path)
    found = bench.find(TOKENS)
    assert found is not None
    assert found.tokens == 1300
    ticket = bench.restore(TOKENS, found)
    assert ticket.tokens == 512
    assert "damaged" in ticket.reason
    bench.check_restored(TOKENS, ticket)
    bench.close()


def test_strangers_in_the_folder(tmp_path: Path) -> None:
    """Files that nobody of ours wrote are no records; folders of other names are let alone."""
    filled(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / IDENTITY.key / "junk").write_bytes(b"x" * 1000)
    (tmp_path / IDENTITY.key / ".writing-1-abc").write_bytes(b"x" * 1000)
    bench = opened(tmp_path)
    found = bench.find(TOKENS)
    assert found is not None
    assert found.tokens == 1300
    assert len(records(tmp_path)) == 5
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    bench.close()


def test_identity_is_told_in_clear(tmp_path: Path) -> None:
    filled(tmp_path)
    assert msgspec.json.decode((tmp_path / IDENTITY.key / "key.json").read_bytes(), type=Identity) == IDENTITY
