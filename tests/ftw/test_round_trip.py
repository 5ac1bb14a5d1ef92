"""What an FTW directory holds is what the source means: bit by bit where kept, else rounded as the format says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, FORMATS, NVFP4
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import unpack_expert
from ftengine.formats.quantize import quantize
from ftengine.weights.buffer import host_buffer
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import DENSE_FORMATS, EXPERT_FORMATS, Options
from ftengine.weights.ftw.layout import Origin
from ftengine.weights.ftw.source import FtwSource
from ftengine.weights.ftw.verify import verify
from ftengine.weights.gguf_source import GgufSource
from ftengine.weights.open import open_source
from ftengine.weights.stack import natural
from tests.weights import checkpoints
from tests.weights.conventions import CONVENTIONS

ORIGIN = Origin("tiny")


def experts(source: FtwSource) -> Iterator[tuple[str, QuantMatrix]]:
    """Every expert matrix by canonical name, read a layer at a time as a loader does."""
    for section in source.header.experts:
        layer, layout = section.layer, source.expert_layout(section.layer)
        assert layout is not None
        bank = host_buffer(section.experts * layout.block_bytes).view(-1, layout.block_bytes)
        source.read_experts(layer, bank)
        for expert, block in enumerate(bank):
            *matrices, _ = unpack_expert(layout, block)
            for name, matrix in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True):
                assert isinstance(matrix, QuantMatrix)
                yield f"layers.{layer}.mlp.experts.{expert}.{name}.weight", matrix


def values(folder: Path) -> dict[str, torch.Tensor]:
    """float32 of every weight by canonical name."""
    with FtwSource(folder) as source:
        found = {name: source.plain(name, torch.float32) for name in source.tensors()}
        found |= {name: dequantize(matrix) for name, matrix in experts(source)}
    return found


@pytest.mark.parametrize("name", CONVENTIONS)
def test_kept_weights_mean_what_their_maker_meant(tmp_path: Path, name: str) -> None:
    """The meanings are written by the tests' own code for each maker's convention, not by the engine's."""
    meaning = checkpoints.write(tmp_path / "model", CONVENTIONS[name])
    header = convert(tmp_path / "model", tmp_path / "out", Options(verify=True), ORIGIN)
    assert header.quantization == ()
    found = values(tmp_path / "out")
    assert found.keys() == meaning.keys()
    for tensor, expected in meaning.items():
        torch.testing.assert_close(found[tensor], expected, rtol=2e-7, atol=0, msg=tensor)
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["modelopt-mixed", "compressed-mxfp4", "fp8-blocks"])
def test_keeping_keeps_every_bit(tmp_path: Path, name: str) -> None:
    checkpoints.write(tmp_path / "model", CONVENTIONS[name])
    convert(tmp_path / "model", tmp_path / "out", Options(), ORIGIN)
    with open_source(tmp_path / "model") as source, FtwSource(tmp_path / "out") as written:
        found = dict(experts(written)) | {
            tensor: natural(written.matrix(tensor))
            for tensor, facts in written.tensors().items()
            if len(facts.shape) == 2
        }
        assert found.keys() == {tensor for tensor, facts in source.tensors().items() if len(facts.shape) == 2}
        for tensor, matrix in found.items():
            expected = natural(source.matrix(tensor))
            assert matrix.format is expected.format
            for ours, theirs in (
                (matrix.codes, expected.codes),
                (matrix.scales, expected.scales),
                (matrix.row_scales, expected.row_scales),
            ):
                assert (ours is None) == (theirs is None), tensor
                assert ours is None or theirs is None or torch.equal(ours, theirs), tensor


OPTIONS = [
    *((experts, "keep") for experts in EXPERT_FORMATS[1:]),
    *(("keep", dense) for dense in DENSE_FORMATS[1:]),
    ("nvfp4", "fp8"),
]


@pytest.mark.parametrize(("expert_format", "dense_format"), OPTIONS)
def test_quantizing_rounds_as_the_format_says(tmp_path: Path, expert_format: str, dense_format: str) -> None:
    """Against `quantize` of each matrix alone; the losses in the header against norms computed here."""
    meaning = checkpoints.write(tmp_path / "model", CONVENTIONS["plain"])
    header = convert(tmp_path / "model", tmp_path / "out", Options(expert_format, dense_format, verify=True), ORIGIN)
    found = values(tmp_path / "out")
    losses: dict[str, list[float]] = {}
    for name, weight in meaning.items():
        choice = expert_format if ".experts." in name else dense_format
        if choice in ("keep", "bf16") or weight.dim() == 1 or name.endswith(".mlp.gate.weight"):
            assert torch.equal(found[name], weight), name
            continue
        expected = dequantize(quantize(weight, FORMATS[choice]))
        assert torch.equal(found[name], expected), name
        part = next(key for key in ("experts", "self_attn", "embed_tokens", "lm_head") if key in name)
        losses.setdefault(part, []).append(float((expected - weight).norm() / weight.norm()))
    named = {"self_attn": "attention", "embed_tokens": "embedding", "lm_head": "output head"}
    stated = {item.part: item for item in header.quantization}
    assert stated.keys() == {named.get(part, part) for part in losses}
    for part, errors in losses.items():
        item = stated[named.get(part, part)]
        assert item.matrices == len(errors)
        assert item.mean == pytest.approx(sum(errors) / len(errors), rel=1e-4)
        assert item.worst == pytest.approx(max(errors), rel=1e-4)
        assert 0 < item.worst < 0.2


def test_what_has_the_wanted_format_is_not_touched(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "model", CONVENTIONS["fp8-blocks"])
    kept = convert(tmp_path / "model", tmp_path / "kept", Options(), ORIGIN)
    again = convert(tmp_path / "model", tmp_path / "again", Options(experts="fp8"), ORIGIN)
    assert kept.experts == again.experts
    assert again.quantization == ()


def test_large_matrices_are_written_in_blocks(tmp_path: Path) -> None:
    """2,500 rows are two blocks and a part: equal where kept, and NVFP4 with a second scale for each block."""
    weight = torch.randn(2500, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[2100:] *= 64
    tensors = {f"{name}.weight": tensor for name, tensor in (("embed_tokens", weight), ("norm", weight[0].clone()))}
    checkpoints.save(tmp_path / "model", tensors, {**checkpoints.CONFIG, "vocab_size": 2500})
    convert(tmp_path / "model", tmp_path / "kept", Options(verify=True), ORIGIN)
    assert torch.equal(values(tmp_path / "kept")["embed_tokens.weight"], weight.float())
    convert(tmp_path / "model", tmp_path / "small", Options(dense="nvfp4", verify=True), ORIGIN)
    expected = torch.cat([dequantize(quantize(part, NVFP4)) for part in weight.split(1024)])
    assert torch.equal(values(tmp_path / "small")["embed_tokens.weight"], expected)


def test_expert_blocks_are_addressed_by_layer_and_expert(model: Path, tmp_path: Path) -> None:
    """One file: (layer * E + expert) * block size. Several: the same within each. All read alike."""
    one = convert(model, tmp_path / "one", Options(), ORIGIN)
    many = convert(model, tmp_path / "many", Options(shard_gib=1e-4), ORIGIN)
    size = one.experts[0].layout.block_bytes
    assert [section.offset for section in one.experts] == [layer * checkpoints.EXPERTS * size for layer in range(2)]
    assert len({section.file for section in one.experts}) == 1
    assert len({section.file for section in many.experts}) == 2
    limit = int(1e-4 * 2**30)
    for number, file in enumerate(many.files):
        inside = [section for section in (*many.tensors, *many.experts) if section.file == number]
        assert file.size <= limit or len(inside) == 1
    first, second = values(tmp_path / "one"), values(tmp_path / "many")
    assert all(torch.equal(first[name], second[name]) for name in first)
    for layer in range(2):
        for expert in range(checkpoints.EXPERTS):
            name = f"experts of layer {layer}, {expert}"
            at = (layer * checkpoints.EXPERTS + expert) * size
            block = (tmp_path / "one" / one.files[one.experts[0].file].name).read_bytes()[at : at + size]
            *matrices, _ = unpack_expert(
                one.experts[layer].layout, torch.frombuffer(bytearray(block), dtype=torch.uint8)
            )
            prefix = f"layers.{layer}.mlp.experts.{expert}"
            for key, matrix in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True):
                assert isinstance(matrix, QuantMatrix)
                assert torch.equal(dequantize(matrix), first[f"{prefix}.{key}.weight"]), name


def test_ftw_is_a_source_too(converted: Path, model: Path, tmp_path: Path) -> None:
    """Converted again it is the same, and quantized from FTW the same as from the original."""
    again = convert(converted, tmp_path / "again", Options(shard_gib=1e-4, verify=True), Origin("x"))
    with FtwSource(converted) as source:
        assert (again.tensors, again.experts) == (source.header.tensors, source.header.experts)
    ours = convert(converted, tmp_path / "ours", Options("mxfp4", "fp8", verify=True), ORIGIN)
    theirs = convert(model, tmp_path / "theirs", Options("mxfp4", "fp8", verify=True), ORIGIN)
    assert ours == theirs


def test_gguf_becomes_a_directory_that_stands_alone(tmp_path: Path) -> None:
    from tests.weights.test_gguf_model import small

    path = small(tmp_path / "x.gguf")
    convert(path, tmp_path / "out", Options(verify=True), ORIGIN)
    found = values(tmp_path / "out")
    with GgufSource(path) as source:
        assert found.keys() == source.tensors().keys()
        for name in found:
            assert torch.equal(found[name], source.plain(name, torch.float32)), name
    original, copy = Checkpoint.open(path), Checkpoint.open(tmp_path / "out")
    assert copy.config == original.config
    assert copy.chat_template == original.chat_template
    assert copy.eos_token_ids == original.eos_token_ids
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == original.tokenizer()


def test_small_files_come_along_without_claims_that_no_longer_hold(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", Options(), ORIGIN)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "out"))
    assert "quantization_config" in before
    assert after == {key: value for key, value in before.items() if key != "quantization_config"}


def test_a_layer_of_mixed_formats_becomes_bf16(tmp_path: Path) -> None:
    """One expert in BF16 among NVFP4 ones: a block has one form, and BF16 holds what both say, rounded once."""
    meaning = checkpoints.write(tmp_path / "nvfp4", CONVENTIONS["modelopt-nvfp4"])
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "nvfp4" / "model.safetensors")
    prefix = "model.layers.1.mlp.experts.2.gate_proj."
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    name = "layers.1.mlp.experts.2.gate_proj.weight"
    tensors[f"{prefix}weight"] = meaning[name].bfloat16()
    checkpoints.save(tmp_path / "mixed", tensors, checkpoints.CONFIG)
    header = convert(tmp_path / "mixed", tmp_path / "out", Options(verify=True), ORIGIN)
    assert [section.layout.gate_up for section in header.experts] == [NVFP4, BF16]
    found = values(tmp_path / "out")
    assert torch.equal(found[name], meaning[name].bfloat16().float())
    other = "layers.1.mlp.experts.0.up_proj.weight"
    assert torch.equal(found[other], meaning[other].bfloat16().float())
