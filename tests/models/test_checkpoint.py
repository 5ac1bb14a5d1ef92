"""Checkpoint: what it reads from a model folder, and what it refuses. Against hand-written folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint

CONFIG = {"architectures": ["MixtralForCausalLM"], "max_position_embeddings": 128, "vocab_size": 100}
INDEX = "model.safetensors.index.json"


def folder_of(path: Path, config: Any = CONFIG, **files: Any) -> Path:
    """files: name with __ for the dot -> content, written as JSON unless it is text."""
    path.mkdir(exist_ok=True)
    for name, content in {"config__json": config, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)
    return path


def weights(path: Path, *names: str) -> None:
    save_file({name: numpy.zeros((2, 3), numpy.float32) for name in names}, path)


def test_reads_a_folder(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        generation_config__json={"eos_token_id": [7, 9]},
        tokenizer_config__json={
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"11": {"content": "<end>"}},
            "chat_template": "older",
        },
        chat_template__jinja="newer",
    )
    weights(folder / "model.safetensors", "a", "b")
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.architecture == "MixtralForCausalLM"
    assert checkpoint.text_config is checkpoint.config
    assert (checkpoint.max_context, checkpoint.vocab_size) == (128, 100)
    assert checkpoint.eos_token_ids == (7, 9, 11)
    assert checkpoint.chat_template == "newer"
    assert sorted(checkpoint.tensors()) == ["a", "b"]
    assert checkpoint.tensors()["b"].shape == (2, 3)
    assert checkpoint.weight_bytes() == 48


def test_reads_a_nested_text_config(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 64, "vocab_size": 50, "eos_token_id": 3}
    checkpoint = Checkpoint.open(folder_of(tmp_path, {"architectures": ["X"], "text_config": text}))
    assert checkpoint.text_config == text
    assert (checkpoint.max_context, checkpoint.vocab_size, checkpoint.eos_token_ids) == (64, 50, (3,))
    assert checkpoint.chat_template is None


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"added_tokens": [{"id": 5, "content": "<end>"}], "model": {"vocab": {"<end>": 6}}}, (2, 5)),
        ({"added_tokens": []}, (2,)),
    ],
)
def test_the_tokenizers_own_end_is_found_in_tokenizer_json(tmp_path: Path, tokenizer: Any, expected: Any) -> None:
    folder = folder_of(
        tmp_path,
        {**CONFIG, "eos_token_id": 2},
        tokenizer_config__json={"eos_token": "<end>"},
        tokenizer__json=tokenizer,
    )
    assert Checkpoint.open(folder).eos_token_ids == expected


def test_the_default_one_of_several_templates_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    folder = folder_of(tmp_path, tokenizer_config__json={"chat_template": templates})
    assert Checkpoint.open(folder).chat_template == "y"


@pytest.mark.parametrize(
    ("pattern", "config"),
    [
        ("valid JSON", "{"),
        ("valid JSON", '{"a": NaN}'),
        ("valid JSON", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("JSON object", []),
        ("architecture", {**CONFIG, "architectures": []}),
        ("architecture", {**CONFIG, "architectures": [7]}),
        ("text_config", {**CONFIG, "text_config": 7}),
        ("vocab_size", {**CONFIG, "vocab_size": "100"}),
        ("vocab_size", {**CONFIG, "vocab_size": True}),
        ("vocab_size", {**CONFIG, "vocab_size": -1}),
        ("max_position_embeddings", {**CONFIG, "max_position_embeddings": 1 << 40}),
        ("max_position_embeddings", {"architectures": ["X"], "vocab_size": 1}),
    ],
)
def test_a_hostile_config_is_refused(tmp_path: Path, pattern: str, config: Any) -> None:
    with pytest.raises(CheckpointError, match=pattern):
        Checkpoint.open(folder_of(tmp_path, config))


def test_files_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(tmp_path)
    big = folder_of(tmp_path / "big")
    with (big / "config.json").open("r+b") as file:
        file.truncate(1 << 34)
    with pytest.raises(CheckpointError, match="larger than"):
        Checkpoint.open(big)
    text = folder_of(tmp_path / "text")
    (text / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="UTF-8"):
        Checkpoint.open(text)


def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, generation_config__json={"eos_token_id": 100})
    with pytest.raises(CheckpointError, match="100, outside its vocabulary"):
        _ = Checkpoint.open(folder).eos_token_ids


ELSEWHERE = ["../x", "/x", "a/b", "a\\b", "a..", "a\0", "C:x"]


@pytest.mark.parametrize("shard", [*(f"{name}.safetensors" for name in ELSEWHERE), "x.bin", "", 7, None])
def test_shard_names_that_lead_elsewhere_are_refused(tmp_path: Path, shard: Any) -> None:
    weights(tmp_path / "x.safetensors", "a")
    folder = folder_of(tmp_path / "model", model__safetensors__index__json={"weight_map": {"a": shard}})
    with pytest.raises(CheckpointError, match="which is refused"):
        Checkpoint.open(folder).tensors()


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    weights(tmp_path / "one.safetensors", "a", "b")
    weights(tmp_path / "two.safetensors", "b", "c")

    def with_map(**weight_map: str) -> Checkpoint:
        names = {name: f"{shard}.safetensors" for name, shard in weight_map.items()}
        return Checkpoint.open(folder_of(tmp_path, model__safetensors__index__json={"weight_map": names}))

    with pytest.raises(CheckpointError, match="b is in both"):
        with_map(a="one", c="two").tensors()
    with pytest.raises(CheckpointError, match="d is listed"):
        with_map(a="one", d="one").tensors()
    with pytest.raises(CheckpointError, match=r"a is in one\.safetensors, not where"):
        with_map(a="two", b="one").tensors()
    with pytest.raises(CheckpointError, match=r"three\.safetensors is missing"):
        with_map(a="three").tensors()


def test_links_are_followed_only_inside_the_folder_and_into_the_hub_cache(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    weights(outside, "a")
    folder = folder_of(tmp_path / "model")
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the model folder"):
        Checkpoint.open(folder).tensors()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(folder).tensors()

    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    folder_of(snapshot)
    weights(blobs / "abc", "a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert list(Checkpoint.open(snapshot).tensors()) == ["a"]


def test_pickle_files_are_refused_unread(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only, a pickle file"):
        Checkpoint.open(folder).tensors()
    assert not (folder / "canary").exists()


def test_code_in_the_folder_is_never_imported_and_torch_is_not_needed(tmp_path: Path) -> None:
    """In a new interpreter started inside the folder, where `auto_map` names modules that would leave a mark."""
    folder = folder_of(
        tmp_path,
        {**CONFIG, "auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}},
        configuration_x__py="open('canary', 'w')",
        modeling_x__py="open('canary', 'w')",
    )
    weights(folder / "model.safetensors", "a")
    script = (
        "import sys; from ftengine.weights.checkpoint import Checkpoint; c = Checkpoint.open('.');"
        "c.tensors(); c.eos_token_ids; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, timeout=60)
    assert not (folder / "canary").exists()
