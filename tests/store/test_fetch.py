"""A pull from the Hub, by the real client and our transfer against a Hub on loopback: what comes, what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.store import manifest, resolve
from ftlaunch.store.events import Complete, Event, Moved, Planned, Said
from ftlaunch.store.machine import Machine
from ftlaunch.store.names import canonical
from ftlaunch.store.pull import pull
from ftlaunch.store.wishes import Wishes
from tests.store.hubs import NAME, a_hub, digest, get, models, same
from tests.store.models import model, safetensors
from tests.support.hub_server import COMMIT, Hub

__all__ = ["a_hub"]
OTHER = "f" * 40


def test_a_model_arrives_whole_and_recorded(a_hub: Hub, ft_home: Path) -> None:
    files = model(9 << 20, 1 << 20)
    a_hub.add(NAME, files)
    seen: list[Event] = []
    pulled = get(seen=seen)
    assert pulled.fetched
    assert same(pulled.path, files)
    written = manifest.read(pulled.path)
    assert written is not None
    assert written.source == manifest.Source("hub", NAME, COMMIT, "main")
    assert written.files == {name: manifest.File(len(content), digest(content)) for name, content in files.items()}
    assert models(ft_home) == ["org--name"]
    total = sum(map(len, files.values()))
    assert Planned(NAME, COMMIT, len(files), total, 0) in seen
    assert {event.file for event in seen if isinstance(event, Complete)} == files.keys()
    assert [event for event in seen if isinstance(event, Moved)][-1].done == total
    for spelling in (NAME, "org--name", f"{NAME}@main", f"{NAME}@{COMMIT}"):
        assert resolve(spelling) == pulled.path
    assert canonical("org--name") == NAME
    with pytest.raises(FtError, match="not v2"):
        resolve(f"{NAME}@v2")


def test_the_second_pull_fetches_nothing(a_hub: Hub) -> None:
    a_hub.add(NAME, model(1000))
    get()
    a_hub.cdn.asked.clear()
    assert not get().fetched
    assert a_hub.cdn.asked == []


def test_only_the_hub_sees_the_token(a_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model(1000)
    a_hub.add(NAME, files, token="hf_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert same(get().path, files)
    assert a_hub.cdn.asked
    assert not any("hf_secret" in str(headers) for _, _, headers in a_hub.cdn.asked)
    assert all("hf_secret" in headers.get("Authorization", "") for _, path, headers in a_hub.asked if "resolve" in path)


@pytest.mark.parametrize(
    ("settings", "token", "sentence", "step"),
    [
        ({"token": "hf_a"}, "", "or it is private and no token is set", "HF_TOKEN="),
        ({"token": "hf_a"}, "hf_b", "or your token may not read it", "look at http"),
        ({"token": "hf_a", "gated": True}, "", "accepted its terms", "accept its terms at http"),
        ({"token": "hf_a", "gated": True}, "hf_b", "accepted its terms", "HF_TOKEN="),
    ],
)
def test_no_access(
    a_hub: Hub, settings: dict, token: str, sentence: str, step: str, ft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_hub.add(NAME, model(1000), **settings)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(FtError, match=sentence) as caught:
        get()
    assert step in caught.value.next_step
    assert models(ft_home) == []


@pytest.mark.parametrize(("name", "sentence"), [("org/gone", "no model org/gone"), (f"{NAME}@v9", "no revision 'v9'")])
def test_what_is_not_there(a_hub: Hub, name: str, sentence: str) -> None:
    a_hub.add(NAME, model(1000))
    with pytest.raises(FtError, match=sentence):
        get(name)


def test_a_new_revision_replaces_the_old_and_takes_over_what_stays(a_hub: Hub, ft_home: Path) -> None:
    old, new = model(3000, 5 << 20), model(3000, 5 << 20)
    new["model-00001-of-00002.safetensors"] = model(3000, 5 << 20, seed=9)["model-00001-of-00002.safetensors"]
    a_hub.add(NAME, old)
    get()
    a_hub.add(NAME, new, commit=OTHER, refs=("main", "v2"))
    a_hub.cdn.sent = 0
    pulled = get()
    assert pulled.fetched
    assert same(pulled.path, new)
    assert a_hub.cdn.sent < 1 << 20, "the shard that stays was fetched again"
    assert models(ft_home) == ["org--name"]
    written = manifest.read(pulled.path)
    assert written is not None
    assert written.source.revision == OTHER
    assert not get(f"{NAME}@v2").fetched


def test_damage_is_repaired_by_the_next_pull(a_hub: Hub) -> None:
    files = model(3000, 5 << 20)
    shard = "model-00001-of-00002.safetensors"
    a_hub.add(NAME, files)
    path = get().path
    os.truncate(path / shard, 1000)
    with pytest.raises(FtError, match="is damaged: its file"):
        resolve(NAME)
    for content in (b"x" * 1000, files[shard][:-1] + bytes([files[shard][-1] ^ 1])):
        (path / shard).write_bytes(content)
        a_hub.cdn.sent = 0
        assert get().fetched
        assert same(path, files)
        assert a_hub.cdn.sent < 1 << 20, "what was sound was fetched again"


def test_to_another_directory(a_hub: Hub, ft_home: Path, tmp_path: Path) -> None:
    files = model(1000)
    a_hub.add(NAME, files)
    pulled = get(wishes=Wishes(to=tmp_path / "deep" / "there"))
    assert pulled.path == tmp_path / "deep" / "there"
    assert same(pulled.path, files)
    assert models(ft_home) == []
    assert [path.name for path in pulled.path.parent.iterdir()] == ["there"]
    assert resolve(str(pulled.path)) == pulled.path
    assert not get(wishes=Wishes(to=pulled.path)).fetched


@pytest.mark.parametrize("there", ["full", "link", "file"])
def test_a_target_that_is_somebodys(a_hub: Hub, tmp_path: Path, there: str) -> None:
    a_hub.add(NAME, model(1000))
    target, mine = tmp_path / "target", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    if there == "full":
        mine.rename(target)
    elif there == "link":
        target.symlink_to(mine)
    else:
        target.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FtError):
        get(wishes=Wishes(to=target))
    assert [p for p in sorted(tmp_path.rglob("*")) if "ft-home" not in p.parts] == before


def test_pickle_and_code_stay_away(a_hub: Hub, ft_home: Path, tmp_path: Path) -> None:
    """A repository with both forms gives its safetensors; one with pickle alone is refused. The canary never sings."""
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w')".encode()
    files = model(1000, auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    a_hub.add(NAME, {**files, "pytorch_model.bin": b"pickle", "modeling_x.py": code, "setup.sh": b"", "x.pkl": b""})
    assert same(get().path, files)
    a_hub.add("org/pickled", {"config.json": files["config.json"], "pytorch_model.bin": b"cposix\nsystem\n"})
    for wishes in (Wishes(), Wishes(files=("*.bin",))):
        with pytest.raises(FtError, match="pickle"):
            get("org/pickled", wishes)
    assert not canary.exists()
    assert models(ft_home) == ["org--name"]
    assert not any(path.endswith((".py", ".bin?signature=x", ".pkl")) for _, path, _ in a_hub.asked)


def test_gguf_files(a_hub: Hub, ft_home: Path) -> None:
    """The only one is taken; of several one is chosen by its path or a pattern; a split one comes whole."""
    a_hub.add("org/one", {"m-Q4.gguf": b"GGUF4", "mmproj-f16.gguf": b"x", "README.md": b""})
    pulled = get("org/one")
    assert (pulled.name, pulled.path) == ("org/one/m-Q4.gguf", ft_home / "models" / "org--one--m-Q4.gguf" / "m-Q4.gguf")
    assert pulled.path.read_bytes() == b"GGUF4"
    parts = {f"big/m-Q8-0000{n}-of-00002.gguf": b"GGUF%d" % n for n in (1, 2)}
    a_hub.add("org/many", {"m-Q4.gguf": b"GGUF4", "m-Q5.gguf": b"GGUF5", **parts})
    with pytest.raises(FtError, match=r"several models: big/m-Q8-00001-of-00002\.gguf .*m-Q5\.gguf"):
        get("org/many")
    split = get("org/many/big/m-Q8-00002-of-00002.gguf").path
    assert [path.read_bytes() for path in sorted(split.parent.glob("*.gguf"))] == [b"GGUF1", b"GGUF2"]
    assert get("org/many", Wishes(files=("*Q5*",))).path.read_bytes() == b"GGUF5"
    assert resolve("org/many/m-Q5.gguf").read_bytes() == b"GGUF5"


def test_only_the_shards_of_the_index_are_taken(a_hub: Hub) -> None:
    files = model(1000, 1000)
    a_hub.add(NAME, {**files, "consolidated.safetensors": safetensors({"x": 9}), "original/model.safetensors": b"x"})
    assert same(get().path, files)
    a_hub.add("org/lacking", {n: c for n, c in files.items() if "00002-of" not in n})
    with pytest.raises(FtError, match="lacks its file model-00002"):
        get("org/lacking")


def test_what_does_not_fit_is_asked_about(a_hub: Hub, ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model(4 << 20, 2 << 20)
    a_hub.add(NAME, files)
    monkeypatch.setattr("ftlaunch.store.fetch.this_machine", lambda: Machine(1 << 30, "of RAM"))
    with pytest.raises(
        FtError, match=r"the weights take 6\.3 MB \(experts 3\.1 MB, the rest 3\.1 MB\).*not fit"
    ) as caught:
        get()
    assert caught.value.next_step.startswith(f"ft pull {NAME} --yes")
    assert models(ft_home) == []
    asked: list[str] = []
    assert get(wishes=Wishes(confirm=lambda question: bool(asked.append(question)) or True)).fetched
    assert asked[0].endswith("Fetch it anyway?")
    assert "this machine has 1.1 GB of RAM: it does not fit" in asked[0]


def test_what_is_not_served_is_asked_about(a_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    a_hub.add("openai/gpt-oss-20b", model(1000))
    a_hub.add(NAME, model(1000, architectures=["GlmMoeForCausalLM"]))
    for name, sentence in (("gpt-oss-20b", "gpt-oss-20b is not served by ft yet"), (NAME, "architecture GlmMoe")):
        with pytest.raises(FtError, match=sentence):
            pull(name)
    assert pull("GPT-OSS-20B", wishes=Wishes(confirm=lambda question: True)).fetched


def test_a_disk_that_is_too_small_is_refused_with_numbers(a_hub: Hub, ft_home: Path) -> None:
    """The listing tells of a file larger than any disk; nothing is written."""
    repo = a_hub.add(NAME, model(1000))
    rows = repo.siblings()
    rows[0]["size"] = rows[0]["lfs"]["size"] = 1 << 49  # type: ignore[index]
    repo.siblings = lambda: rows  # type: ignore[method-assign]
    with pytest.raises(FtError, match=r"562949\.95 GB are still to come to .* where \d+\.\d\d GB are free"):
        get()
    assert models(ft_home) == []


def test_the_hugging_face_cache_is_used(a_hub: Hub, ft_home: Path, tmp_path: Path) -> None:
    """Filled by the Hub's own client. Nothing is fetched again; a damaged copy is noticed and not used."""
    from huggingface_hub import snapshot_download

    files = model(5000)
    a_hub.add(NAME, files)
    snapshot = Path(snapshot_download(NAME, endpoint=a_hub.url, cache_dir=tmp_path / "hf" / "hub"))
    a_hub.cdn.asked.clear()
    pulled = get()
    assert (pulled.fetched, pulled.path) == (False, snapshot)
    assert a_hub.cdn.asked == []
    assert models(ft_home) == []
    assert resolve(NAME) == snapshot
    shard = (snapshot / "model-00001-of-00001.safetensors").resolve()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    seen: list[Event] = []
    assert same(get(seen=seen).path, files)
    assert any(isinstance(event, Said) and "is damaged; the Hugging Face cache" in event.text for event in seen)


def test_offline(a_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    a_hub.add(NAME, model(1000))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FtError, match="HF_HUB_OFFLINE is set"):
        get()
    assert a_hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    path = get().path
    a_hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get().path == path
    assert a_hub.asked == []


def test_a_header_that_cannot_be_true_stops_a_pull_before_it_begins(a_hub: Hub, ft_home: Path) -> None:
    files = model(1000)
    name = "model-00001-of-00001.safetensors"
    files[name] = (1 << 62).to_bytes(8, "little") + files[name][8:]
    a_hub.add(NAME, files)
    with pytest.raises(FtError, match=r"model-00001-of-00001\.safetensors is not a sound safetensors file"):
        get()
    assert models(ft_home) == []


def test_the_hub_is_asked_again_after_trouble_and_not_for_ever(a_hub: Hub) -> None:
    a_hub.add(NAME, model(1000))
    troubles = [(503, {}), (429, {"Retry-After": "0"}), (500, {})]
    a_hub.status = lambda path: troubles.pop() if troubles else None
    assert get().fetched
    a_hub.status = lambda path: (502, {})
    with pytest.raises(FtError, match=r"HTTP 502 \(4 attempts\)"):
        get()
    a_hub.status = lambda path: (429, {"Retry-After": "600"})
    with pytest.raises(FtError, match="asks to wait 600 seconds"):
        get()


def test_json_events_and_the_sentence_without_a_terminal(
    a_hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftlaunch.cli import main

    a_hub.add(NAME, model(1000))
    assert main(["pull", NAME, "--json"]) == 0
    said = capsys.readouterr()
    events = [json.loads(line) for line in said.out.splitlines()]
    assert [event["event"] for event in events][-2:] == ["progress", "done"]
    assert {"plan", "file"} <= {event["event"] for event in events}
    assert said.err == ""
    monkeypatch.setattr("ftlaunch.store.fetch.this_machine", lambda: Machine(1 << 20, "of RAM"))
    a_hub.add("org/large", model(1000))
    assert main(["pull", "org/large"]) == 1
    error = capsys.readouterr().err
    assert "Error: the weights take" in error
    assert "Try:   ft pull org/large --yes" in error
    assert main(["pull", "org/large", "--yes"]) == 0
