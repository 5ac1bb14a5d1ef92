"""`ft show NAME --fit` of a model that lies on the Hub: as of the same model here, and without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftlaunch.cli import main
from tests.store.hubs import NAME, a_hub
from tests.support import gguf_files
from tests.support.hub_server import Hub
from tests.weights import checkpoints
from tests.weights import test_gguf_source as gguf
from tests.weights.conventions import CONVENTIONS

__all__ = ["a_hub"]  # a fixture


def told(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Data by id."""
    assert main(["show", name, "--fit", "--json"]) in (0, 3)
    document = json.loads(capsys.readouterr().out)
    return {finding["id"]: finding["data"] for finding in document["findings"]}


def same(here: dict[str, dict[str, Any]], there: dict[str, dict[str, Any]]) -> None:
    assert set(here) == set(there)
    for id in ("model.memory", "model.context", "model.strategy"):
        keep = {"needed", "fits", "context", "max_context", "strategy", "device"}
        assert {k: v for k, v in here[id].items() if k in keep} == {k: v for k, v in there[id].items() if k in keep}
    for name in ("dense_bytes", "expert_bytes", "experts", "architecture"):
        assert here["model.files"][name] == there["model.files"][name]
    assert there["model.files"]["path"] is None


def test_safetensors(a_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], ft_home: Path) -> None:
    folder = tmp_path / "model"
    checkpoints.write(folder, CONVENTIONS["modelopt-nvfp4"])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["tokenizer.json"] = bytes(9 << 20)  # never asked for
    a_hub.add(NAME, files)
    there = told(NAME, capsys)
    assert not ft_home.exists(), "nothing is kept of it"
    same(told(str(folder), capsys), there)
    assert there["model.files"]["bytes"] == sum(map(len, files.values()))


def test_gguf(a_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model-Q8_0.gguf"
    given, _ = gguf.qwen3()
    gguf_files.write(file, "qwen3moe", gguf.qwen3_settings, given)
    a_hub.add(NAME, {file.name: file.read_bytes()})
    same(told(str(file), capsys), told(f"{NAME}/{file.name}", capsys))


def test_a_repository_that_is_not_there(a_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "org/nothing", "--fit"]) == 1
    assert "Error: " in capsys.readouterr().err


def test_headers_of_no_sound_file(a_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    checkpoints.write(folder, CONVENTIONS["modelopt-nvfp4"])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = next(name for name in files if name.endswith(".safetensors"))
    files[name] = b"\xff" * 8 + files[name][8:]
    a_hub.add(NAME, files)
    assert main(["show", NAME, "--fit"]) == 4
    assert "Traceback" not in capsys.readouterr().err
