"""`ft list`, `show`, `verify` and `rm` on small models: what they say, what they find, and what they leave alone."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftlaunch.cli import main
from ftlaunch.store import used
from tests.store import small_models
from tests.weights import checkpoints
from tests.weights.conventions import CONVENTIONS


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    _, out, _ = run(capsys, *arguments, "--json")
    return json.loads(out)


@pytest.fixture
def cached(ft_home: Path, tmp_path: Path) -> Path:
    root = Path(os.environ["HF_HUB_CACHE"])
    return small_models.cache(root, "org/cached", small_models.write(tmp_path / "plain"))


def test_list(ft_home: Path, cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_models.store(ft_home, "mine")
    small_models.store(ft_home, "quantized", quantization_config={"quant_method": "fp8"})
    (ft_home / "models" / "broken").mkdir()
    (ft_home / "models" / ".fetch-other").mkdir()
    (ft_home / "models" / ".fetch-other" / "part").write_bytes(b"x" * 5000)
    (ft_home / "models" / ".partial-other").mkdir()  # its files are second names of fetched ones
    os.link(ft_home / "models" / ".fetch-other" / "part", ft_home / "models" / ".partial-other" / "x")
    (ft_home / "models" / ".fetch-mine").mkdir()  # a model that is there is not called incomplete
    used.record("mine")
    models = {model["name"]: model for model in as_json(capsys, "list")}
    assert set(models) == {"mine", "quantized", "broken", "org/cached", "other"}
    assert (models["mine"]["format"], models["mine"]["weights"], models["mine"]["context"]) == (
        "safetensors",
        "bf16",
        64,
    )
    assert models["mine"]["last_used"] is not None
    assert models["quantized"]["weights"] == "fp8"
    assert models["quantized"]["last_used"] is None
    assert models["broken"]["architecture"].startswith("unreadable: ")
    assert (models["org/cached"]["where"], models["org/cached"]["path"]) == ("cache", str(cached))
    assert models["other"] == {
        "name": "other",
        "bytes": 5000,
        "where": "store",
        "complete": False,
        "path": str(ft_home / "models" / ".fetch-other"),
    }
    status, out, err = run(capsys, "list")
    assert status == 0
    assert "org/cached (Hugging Face cache)" in out
    assert "now" in out
    assert "other: 5.0 kB fetched, not complete. Remove it: ft rm other" in err


def test_show_tells_facts_and_where_from(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_models.store(ft_home, "mine")
    shown = as_json(capsys, "show", "mine")
    facts = {name: fact["value"] for name, fact in shown["facts"].items()}
    experts = small_models.EXPERTS * 3 * small_models.HIDDEN * small_models.INTERMEDIATE
    others = sum(values.size for name, values in small_models.tensors().items() if "experts" not in name) - 15
    assert facts["parameters"] == experts + others
    assert facts["active_parameters"] == experts // 2 + others
    assert facts["bytes"] == 2 * (experts + others + 15)
    assert (facts["experts_a_layer"], facts["experts_a_token"], facts["layers"]) == (4, 2, 1)
    assert (facts["tool_calls"], facts["reasoning"], facts["served"]) == ("hermes", "<think> blocks", "yes")
    assert (facts["source"], facts["revision"]) == ("hub org/name", f"{small_models.COMMIT} (asked for: main)")
    assert all(fact["from"] for fact in shown["facts"].values())
    assert shown["facts"]["architecture"]["from"] == "config.json"
    parts = {part["name"]: part for part in shown["parts"]}
    assert parts["experts"]["parameters"] == experts
    assert parts["experts"]["formats"] == ["f16"]
    assert not parts["vision"]["loaded"]
    status, out, _ = run(capsys, "show", "mine")
    assert status == 0
    assert "vision (not loaded)" in out


@pytest.mark.parametrize("name", CONVENTIONS)
def test_show_counts_the_parameters_of_every_makers_form(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the numbers are stored, the model has as many; and the form is named as the loader reads it."""
    checkpoints.write(tmp_path / "m", CONVENTIONS[name])
    shown = as_json(capsys, "show", str(tmp_path / "m"))
    assert shown["facts"]["parameters"]["value"] == sum(values.numel() for values in checkpoints.weights().values())
    assert shown["facts"]["weights"]["value"] == CONVENTIONS[name].text
    files = sum(path.stat().st_size for path in (tmp_path / "m").glob("*.safetensors"))
    assert files * 0.9 < shown["facts"]["bytes"]["value"] < files


def test_show_of_a_cached_model(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "show", "org/cached")["facts"]
    assert facts["revision"] == {"value": small_models.COMMIT, "from": "Hugging Face cache"}
    assert facts["path"]["value"] == str(cached)


def test_show_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gguf.constants import GGMLQuantizationType

    from tests.support import gguf_files
    from tests.weights import test_gguf_source as weights

    given, _ = weights.qwen3()
    q8 = GGMLQuantizationType.Q8_0
    path = tmp_path / "x.gguf"
    gguf_files.write(
        path, "qwen3moe", weights.qwen3_settings, given, lambda name: q8 if "exps" in name else GGMLQuantizationType.F32
    )
    shown = as_json(capsys, "show", str(path))
    assert shown["facts"]["format"] == {"value": "gguf", "from": "GGUF header"}
    assert shown["facts"]["experts_a_layer"]["value"] == 4
    experts = next(part for part in shown["parts"] if part["name"] == "experts")
    assert (experts["parameters"], experts["formats"]) == (4 * 3 * 64 * 96, ["q8_0"])


def test_verify_finds_every_flipped_bit(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two hundred places of a shard, one bit each."""
    from ftlaunch.store.find import find
    from ftlaunch.store.verify import verify

    folder = small_models.store(ft_home, "mine")
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    status, out, _ = run(capsys, "verify")
    assert (status, out) == (0, "mine: whole, 4 files\n")
    chance = random.Random(3)
    found = find("mine")
    for place in chance.sample(range(len(sound) * 8), 200):
        changed = bytearray(sound)
        changed[place // 8] ^= 1 << place % 8
        weights.write_bytes(changed)
        assert [fault.file for fault in verify(found).faults] == ["model.safetensors"]
    status, out, _ = run(capsys, "verify", "mine")
    assert status == 1
    assert out == "mine: model.safetensors differs from its recorded hash\nTry:   ft pull org/name\n"


def test_verify_names_each_fault(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_models.store(ft_home, "mine", shards=3)
    small_models.store(ft_home, "sound")
    (folder / "config.json").unlink()
    os.truncate(folder / "model-00001-of-00003.safetensors", 100)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00002-of-00003.safetensors").symlink_to("/etc/hostname")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    (report, sound) = as_json(capsys, "verify")
    faults = {fault["file"]: fault["what"] for fault in report["faults"]}
    assert sound["faults"] == []
    assert faults["config.json"] == "is missing"
    assert faults["model-00001-of-00003.safetensors"].startswith("has 100 bytes")
    assert "leads out of the model folder" in faults["model-00002-of-00003.safetensors"]
    assert "not a regular file" in faults["tokenizer.json"]
    assert len(faults) == 4


def test_verify_without_hashes_says_so_and_looks_at_headers(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_models.store(ft_home, "mine", recorded=False)
    status, out, _ = run(capsys, "verify", "mine")
    assert status == 0
    assert "no hashes were recorded" in out
    os.truncate(folder / "model.safetensors", 500)
    status, out, _ = run(capsys, "verify", "mine")
    assert status == 1
    assert "its header claims" in out


def test_verify_of_the_cache_uses_its_file_names(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", "org/cached")
    assert (status, out) == (0, "org/cached: whole, 4 files\n")
    for name in ("model.safetensors", "config.json"):
        blob = (cached / name).resolve()
        content = bytearray(blob.read_bytes())
        content[-1] ^= 1
        blob.write_bytes(content)
    status, out, _ = run(capsys, "verify", "org/cached")
    assert status == 1
    assert "config.json differs" in out
    assert "model.safetensors differs" in out
    assert "hf download org/cached --force-download" in out


def test_rm_asks_and_removes_all_of_a_model(
    ft_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_models.store(ft_home, "mine")
    other = small_models.store(ft_home, "mine-too")
    for name in (".fetch-mine", ".partial-mine", ".old-mine"):
        (folder.parent / name).mkdir()
    used.record("mine")
    status, _, err = run(capsys, "rm", "mine")
    assert status == 1
    assert "ft rm mine --yes" in err
    assert folder.is_dir()
    monkeypatch.setattr("ftlaunch.cli.rm._is_terminal", lambda: True)
    for answer, goes in (("n\n", False), ("\n", False), ("y\n", True)):
        monkeypatch.setattr("sys.stdin", __import__("io").StringIO(answer))
        status, out, err = run(capsys, "rm", "mine")
        assert status == 0
        assert f"Remove {folder} (" in err
        assert folder.exists() is not goes
    assert "Removed" in out
    assert {path.name for path in folder.parent.iterdir()} == {"mine-too", ".lock-mine"}
    assert other.is_dir()


def test_rm_follows_no_link(ft_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is a link, and links inside a model: what they lead to stays."""
    elsewhere = small_models.write(tmp_path / "elsewhere")
    folder = small_models.store(ft_home, "mine")
    (folder / "out").symlink_to(elsewhere)
    (folder / "file").symlink_to(elsewhere / "config.json")
    (folder.parent / "linked").symlink_to(elsewhere)
    (folder.parent / "dangling").symlink_to(tmp_path / "nowhere")
    status, out, _ = run(capsys, "rm", "linked", "--yes")
    assert (status, out) == (0, f"Removed the link to {elsewhere}.\n")
    for name in ("mine", "dangling"):
        assert run(capsys, "rm", name, "--yes")[0] == 0
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(
        path.name for path in small_models.write(tmp_path / "reference").iterdir()
    )
    assert {path.name for path in folder.parent.iterdir()} == {".lock-mine", ".lock-linked", ".lock-dangling"}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("unknown", "no model is called unknown"),
        ("org/cached", "lies in the Hugging Face cache"),
        ("..", "yours to remove"),
        ("../models", "yours to remove"),
        ("/", "yours to remove"),
        (".lock-mine", "no model is called"),
        ("", "no model is called"),
        ("a\0b", "no model is called"),
    ],
)
def test_rm_refuses_what_is_not_the_stores(
    name: str, sentence: str, ft_home: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_models.store(ft_home, "mine")
    (ft_home / "models" / ".lock-mine").touch()
    before = sorted(ft_home.rglob("*"))
    status, _, err = run(capsys, "rm", name, "--yes")
    assert status == 1
    assert sentence in err
    assert sorted(ft_home.rglob("*")) == before
    assert cached.is_dir()
    if name == "org/cached":
        assert "hf cache rm model/org/cached" in err


def test_rm_refuses_while_a_server_uses_it(
    ft_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is a locked record: this process holds one for a store name, then for a file inside the model."""
    from ftlaunch.servers.publish import publish
    from ftlaunch.servers.record import ServerRecord
    from ftlaunch.servers.registry import port_path

    folder = small_models.store(ft_home, "mine")
    small_models.store(ft_home, "other")
    for number, model in enumerate(("mine", str(folder), str(folder / "x.gguf"))):
        record = ServerRecord(f"s{number}", os.getpid(), "127.0.0.1", 1, model, "mine", None, 0.0, None, None)
        with publish(record):
            port_path(record.id).write_text('{"port": 1919}')
            status, _, err = run(capsys, "rm", "mine", "--yes")
            assert status == 1
            assert "is being served at http://127.0.0.1:1919" in err
            assert "ft stop mine" in err
    assert folder.is_dir()
    assert run(capsys, "rm", "mine", "--yes")[0] == 0


def test_used_never_fails(ft_home: Path, tmp_path: Path) -> None:
    used.record("mine")  # there is no store
    assert not ft_home.exists()
    small_models.store(ft_home, "mine")
    (ft_home / "models" / ".used-mine").mkdir()
    used.record("mine")
    shutil.rmtree(ft_home / "models" / ".used-mine")
    (ft_home / "models" / ".used-mine").symlink_to(tmp_path / "target")
    used.record("mine")
    assert not (tmp_path / "target").exists()
    used.record(str(tmp_path))
    used.record("a\0b")
    (ft_home / "models" / ".used-mine").unlink()
    used.record("mine")
    assert used.when("mine") is not None
    assert used.when("other") is None


@pytest.fixture(scope="module")
def ftw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, quantized."""
    from ftengine.weights.convert.convert import convert
    from ftengine.weights.convert.plan import Options
    from ftengine.weights.ftw.layout import Origin

    folder = tmp_path_factory.mktemp("ftw")
    checkpoints.write(folder / "model", CONVENTIONS["plain"])
    convert(folder / "model", folder / "out", Options(experts="nvfp4"), Origin("org/name", "", "safetensors"))
    return folder / "out"


def test_ftw_is_shown_listed_and_verified(
    ftw: Path, ft_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = as_json(capsys, "show", str(ftw.parent / "model"))
    shown = as_json(capsys, "show", str(ftw))
    for fact in ("parameters", "active_parameters", "architecture", "context", "experts_a_layer"):
        assert shown["facts"][fact]["value"] == source["facts"][fact]["value"], fact
    experts = next(part for part in shown["parts"] if part["name"] == "experts")
    assert experts["formats"] == ["nvfp4"]
    (loss,) = [item for item in shown["quantization"] if item["part"] == "experts"]
    assert 0 < loss["mean"] <= loss["worst"] < 0.3
    assert "MEAN ERROR" in run(capsys, "show", str(ftw))[1]
    stored = shutil.copytree(ftw, ft_home / "models" / "mine")
    (model,) = as_json(capsys, "list")
    assert model["format"] == "ftw"
    assert run(capsys, "verify", "mine")[0] == 0
    experts_file = next(stored.glob("experts-*.ftw"))
    content = bytearray(experts_file.read_bytes())
    content[len(content) // 2] ^= 1
    experts_file.write_bytes(content)
    status, out, _ = run(capsys, "verify", "mine")
    assert status == 1
    assert f"mine: {experts_file.name} differs from its recorded hash in " in out
    assert "ft checkpoint again" in out
    (stored / "ftw.json").write_text("{}")
    status, out, _ = run(capsys, "verify", "mine")
    assert status == 1
    assert "ftw.json" in out


def test_serving_is_noted_and_names_the_model(
    ft_home: Path, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where the server itself would begin. The API's name of a model is never a commit or a file's ending."""
    from ftengine.api import server
    from ftengine.api.settings import ServeSettings
    from ftlaunch.servers.options import ServeOptions
    from ftlaunch.servers.serve import serve

    small_models.store(ft_home, "mine")
    small_models.store(ft_home, "org--pulled")
    plain = small_models.write(tmp_path / "folder")
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    names: dict[str, str] = {}
    for model in ("mine", "org/pulled", "org--pulled", "org/cached", str(plain), str(tmp_path / "file.gguf")):

        def run(settings: ServeSettings, at_end: object, look: object, model: str = model) -> None:
            names[model] = settings.served_name

        monkeypatch.setattr(server, "run", run)
        serve(ServeOptions(model=model, port=0))
    assert list(names.values()) == ["mine", "org/pulled", "org/pulled", "org/cached", "folder", "file"]
    assert all(used.when(name) is not None for name in ("mine", "org/pulled", "org/cached"))
    assert sorted(path.name for path in (ft_home / "models").glob(".used-*")) == [
        ".used-mine",
        ".used-org--cached",
        ".used-org--pulled",
    ]


def test_a_folder_of_the_store_may_have_any_name(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `ft list` names, the other commands take, and one odd name does not keep `ft verify` from the rest."""
    small_models.store(ft_home, "has blank")
    small_models.store(ft_home, "mine")
    assert run(capsys, "show", "has blank")[0] == 0
    status, out, _ = run(capsys, "verify")
    assert status == 0
    assert "has blank: whole" in out
    assert "mine: whole" in out
    assert run(capsys, "rm", "has blank", "--yes")[0] == 0
    assert not (ft_home / "models" / "has blank").exists()


@pytest.mark.parametrize("source", ["/where/it came/from", "org/name"])
def test_the_way_back_is_where_a_model_came_from(
    ft_home: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    """A folder's own name is nothing that `ft pull` could fetch."""
    import shlex

    from ftlaunch.store import manifest

    folder = small_models.store(ft_home, "mine")
    kind = "directory" if source.startswith("/") else "hub"
    manifest.write(folder, manifest.Source(kind, source), manifest.hash_files(folder))
    (folder / "model.safetensors").write_bytes(b"")
    for command in (["verify", "mine"], ["serve", "--model", "mine"]):
        status, out, err = run(capsys, *command)
        assert status == 1
        assert f"ft pull {shlex.quote(source)}\n" in out + err


def test_a_removed_working_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, before = tmp_path / "gone", Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        folder.rmdir()
        status, _, err = run(capsys, "serve", "--model", "./x")
    finally:
        os.chdir(before)
    assert (status, err) == (
        1,
        "Error: the folder that this shell is in was removed\nTry:   cd to another folder\n",
    )


def test_list_tells_a_model_that_lost_a_file(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small_models.store(ft_home, "mine") / "model.safetensors").unlink()
    assert as_json(capsys, "list")[0]["architecture"] == ("damaged: its file model.safetensors is missing or cut short")
