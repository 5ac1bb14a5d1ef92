"""Peak memory of converting and of loading, in processes of their own. `pytest -m slow tests/ftw`: 2 GB of disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.weights import checkpoints

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, VOCABULARY = 1024, 768, 64, 2, 151_936
LAYER_BYTES = EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2
LARGEST = max(LAYER_BYTES, VOCABULARY * HIDDEN * 2)

# ru_maxrss would begin with what the parent of the process had.
PEAK = """
import re, sys
from pathlib import Path

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

"""
CONVERT = """
from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw.layout import Origin
before = peak()
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(sys.argv[3], sys.argv[4]), Origin("x"))
print(peak() - before)
"""
LOAD = """
import torch
from ftengine.weights.buffer import host_buffer
from ftengine.weights.ftw.source import FtwSource
before = peak()
kept = []
with FtwSource(Path(sys.argv[1])) as source:
    for name, facts in source.tensors().items():
        kept.append(source.matrix(name) if len(facts.shape) == 2 else source.plain(name, torch.float32))
    for section in source.header.experts:
        kept.append(host_buffer(section.extent))
        source.read_experts(section.layer, kept[-1].view(section.experts, -1))
print(peak() - before, source.header.weight_bytes)
"""


def run(program: str, *arguments: object) -> list[int]:
    words = [sys.executable, "-c", PEAK + program, *map(str, arguments)]
    return [int(word) for word in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()]


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= {f"{prefix}.{name}_proj.weight": matrix(INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
            tensors[f"{prefix}.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    folder = tmp_path_factory.mktemp("large") / "model"
    checkpoints.save(folder, tensors, {**checkpoints.CONFIG, "vocab_size": VOCABULARY, "hidden_size": HIDDEN})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "dense"), [("keep", "keep"), ("nvfp4", "nvfp4")])
def test_converting_takes_the_largest_layer_and_little_more(
    large: Path, tmp_path: Path, experts: str, dense: str
) -> None:
    (grown,) = run(CONVERT, large, tmp_path / "out", experts, dense)
    assert grown < LARGEST + 2e9, f"{grown / 1e9:.2f} GB"


@pytest.mark.slow
def test_loading_takes_the_weights_and_little_more(large: Path, tmp_path: Path) -> None:
    run(CONVERT, large, tmp_path / "out", "keep", "keep")
    grown, weights = run(LOAD, tmp_path / "out")
    assert weights < grown + (64 << 20), "the weights were not read"
    assert grown < weights + 1e9, f"{grown / 1e9:.2f} GB for {weights / 1e9:.2f} GB of weights"
