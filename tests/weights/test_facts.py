"""What headers tell without torch, against the sources that read the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.facts import weight_facts
from ftengine.weights.ftw.layout import Origin
from ftengine.weights.open import open_source
from tests.support import gguf_files
from tests.weights import checkpoints
from tests.weights import test_gguf_source as gguf
from tests.weights.conventions import CONVENTIONS


@pytest.fixture(scope="module", params=[*CONVENTIONS, "ftw", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts") / "model"
    if request.param == "gguf":
        given, _ = gguf.qwen3()
        file = folder.with_suffix(".gguf")
        gguf_files.write(file, "qwen3moe", gguf.qwen3_settings, given)
        return file
    checkpoints.write(folder, CONVENTIONS["modelopt-nvfp4" if request.param == "ftw" else request.param])
    if request.param == "ftw":
        out = folder.with_name("converted")
        convert(folder, out, Options(), Origin("tiny", "0123abcd", "safetensors"))
        return out
    return folder


def test_facts_are_those_of_the_source(model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    told = weight_facts(checkpoint)
    with open_source(checkpoint) as source:
        assert told.tensors() == source.tensors()
        layers = range(checkpoint.text_config["num_hidden_layers"] + 1)
        assert [told.expert_layout(layer) for layer in layers] == [source.expert_layout(layer) for layer in layers]


CODE = """if True:
    import sys
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.facts import weight_facts
    assert weight_facts(Checkpoint.open(sys.argv[1])).tensors()
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("model", ["modelopt-nvfp4", "ftw", "gguf"], indirect=True)
def test_no_torch_is_imported(model: Path) -> None:
    subprocess.run([sys.executable, "-c", CODE, model], check=True)
