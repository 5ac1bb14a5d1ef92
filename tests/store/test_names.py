"""What a person may type after --model, and what no name may do."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.store import canonical, manifest, resolve
from ftlaunch.store.listing import installed
from ftlaunch.store.names import unknown
from ftlaunch.store.pull import pull


def make_model(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    content = {"architectures": ["MixtralForCausalLM"], "max_position_embeddings": 64, "vocab_size": 8, **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_directory_by_path_and_by_bare_name(tmp_path: Path, ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for typed in (str(model), "./mine", "mine", f"{model}/", "../" + tmp_path.name + "/mine"):
        assert resolve(typed) == model
        assert canonical(typed) == str(model)


def test_a_store_name_is_meant_before_a_directory(
    tmp_path: Path, ft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = make_model(ft_home / "models" / "demo")
    make_model(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert resolve("demo") == stored
    assert canonical("demo") == "demo"
    assert resolve("./demo") == tmp_path / "demo"


def test_a_damaged_model_that_can_be_fetched_says_how(ft_home: Path) -> None:
    """Before anything is loaded. A file that the user made longer, and a model without a record, are not damage."""
    stored = make_model(ft_home / "models" / "demo")
    weights = stored / "model.safetensors"
    weights.write_bytes(b"12345678")
    assert resolve("demo") == stored
    manifest.write(stored, manifest.Source("recipe", "1"), manifest.hash_files(stored))
    weights.write_bytes(b"123456789")
    assert resolve("demo") == stored
    for harm in (lambda: weights.write_bytes(b"1234567"), weights.unlink):
        harm()
        with pytest.raises(FtError, match=r"model\.safetensors is missing or cut short") as caught:
            resolve("demo")
        assert caught.value.next_step == "ft pull demo"


@pytest.mark.parametrize(
    ("typed", "sentence", "step"),
    [
        ("demo", "not in the store yet", "ft pull demo"),
        ("nothing", "no model is called nothing", "ft pull demo"),
        ("org/name", "the model org/name is not in the store yet", "ft pull org/name"),
        ("Qwen3-30B-A3B", "not in the store yet", "ft pull Qwen3-30B-A3B"),
        ("./missing", "there is no directory ./missing", "ft list"),
        ("/", "holds no config.json", "ft list"),
        ("x" * 300, "no model is called", ""),
        ("a\0b", "no model is called", ""),
        ("", "no model is called", ""),
    ],
)
def test_what_is_said_of_others(ft_home: Path, typed: str, sentence: str, step: str) -> None:
    with pytest.raises(FtError, match=sentence) as caught:
        resolve(typed)
    assert step in caught.value.next_step
    assert "\n" not in str(caught.value)


def test_hostile_names_write_nothing(tmp_path: Path, ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand names of the kinds in use against path handling: each is refused, and no file appears anywhere."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    pieces = [
        "..",
        ".",
        "/",
        "\\",
        "\0",
        "CON",
        "nul",
        "demo",
        "\u2025",
        "\uff0e\uff0e",
        "%2e%2e",
        "a//b",
        ":",
        "x" * 300,
        "~",
        " ",
    ]
    chance = random.Random(5)
    before = sorted(tmp_path.rglob("*"))
    for _ in range(1000):
        name = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 6)))
        if name.strip("/.") == "demo" or name == "demo":
            continue
        with pytest.raises(FtError):
            pull(name)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_listing_shows_whole_models_only(ft_home: Path) -> None:
    make_model(ft_home / "models" / "good")
    make_model(ft_home / "models" / ".partial-other")
    (ft_home / "models" / ".fetch-other").mkdir()
    (ft_home / "models" / "broken").mkdir()
    good, broken = sorted(installed(), key=lambda model: model.name != "good")
    assert (good.name, good.architecture, good.context) == ("good", "MixtralForCausalLM", 64)
    assert broken.architecture.startswith("unreadable: ")
    with pytest.raises(FtError):
        resolve(".partial-other")
    with pytest.raises(FtError):
        resolve("broken")


def test_what_is_said_of_an_unknown_name(ft_home: Path) -> None:
    """The closest ones, of the store and of the catalogue, and what was typed as far as it is text."""
    make_model(ft_home / "models" / "someone--nice-model")
    for typed, told in (
        ("dmo", "no model is called dmo; there is demo"),
        ("someone-nice-model", "no model is called someone-nice-model; there is someone/nice-model"),
        ("qwen3-30b", "no model is called qwen3-30b; there is qwen3-30b-a3b"),
        ("zzzz", "no model is called zzzz"),
        ("a\x1b[31m", r"no model is called 'a\x1b[31m'"),
        (os.fsencode("a/Mödel/x").decode("ascii", "surrogateescape"), "no model is called a/Mödel/x"),
        ("a/\udcff/x", "no model is called a/\ufffd/x"),
    ):
        said = str(unknown(typed))
        assert said.startswith(told), said
        assert len(said) < 120
