"""A tiny Qwen3-MoE in every maker's convention, written by conventions.py here: read back, number by number."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.pack import pack, unpack
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.quantization import describe
from ftengine.weights.safetensors_source import SafetensorsSource
from tests.weights import checkpoints
from tests.weights.checkpoints import CONFIG, EXPERTS, HIDDEN, INTERMEDIATE, NAMINGS
from tests.weights.conventions import CONVENTIONS, Tensors, _fp8, _in_pairs, _mxfp4, block_scales, spread


def assert_reads(folder: Path, meaning: Tensors) -> None:
    """All weights, each as the writer meant it; matrices also after packing and unpacking."""
    with SafetensorsSource(folder) as source:
        facts = source.tensors()
        assert set(facts) == set(meaning)
        for name, expected in meaning.items():
            assert facts[name].shape == tuple(expected.shape), name
            assert torch.equal(source.plain(name, torch.float32), expected), name
            if expected.dim() == 2:
                matrix = source.matrix(name)
                assert matrix.format is facts[name].format
                assert torch.equal(dequantize(unpack(pack(matrix))), expected), name


@pytest.mark.parametrize("name", CONVENTIONS)
def test_every_weight_means_what_its_maker_meant(tmp_path: Path, name: str) -> None:
    meaning = checkpoints.write(tmp_path, CONVENTIONS[name])
    assert_reads(tmp_path, meaning)
    assert describe(Checkpoint.open(tmp_path)).text == CONVENTIONS[name].text


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_prefix_is_taken_off(tmp_path: Path, naming: str) -> None:
    assert_reads(tmp_path, checkpoints.write(tmp_path, CONVENTIONS["modelopt-nvfp4"], NAMINGS[naming]))


def test_facts_count_every_byte_once(tmp_path: Path) -> None:
    """Against the tensors of the file, without the scales of activations and caches."""
    checkpoints.write(tmp_path, CONVENTIONS["modelopt-mixed"])
    entries = Checkpoint.open(tmp_path).tensors().values()
    used = sum(entry.nbytes for entry in entries if not entry.name.endswith(("input_scale", "k_scale")))
    with SafetensorsSource(tmp_path) as source:
        assert sum(facts.nbytes for facts in source.tensors().values()) == used


def joined(weights: Tensors, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, H] and [E, H, I] of a layer."""
    prefix = f"layers.{layer}.mlp.experts"
    gate_up = [
        torch.cat([weights[f"{prefix}.{expert}.{name}_proj.weight"] for name in ("gate", "up")])
        for expert in range(EXPERTS)
    ]
    down = [weights[f"{prefix}.{expert}.down_proj.weight"] for expert in range(EXPERTS)]
    return torch.stack(gate_up), torch.stack(down)


def dense_part(weights: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in weights.items() if ".experts." not in name}


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_told_apart(tmp_path: Path, transposed: bool) -> None:
    """transformers 5's layout, and transformers 4's, whose columns are the experts' rows."""
    weights = {name: tensor.bfloat16() for name, tensor in checkpoints.weights().items()}
    tensors = dense_part(weights)
    for layer in range(2):
        for name, tensor in zip(("gate_up_proj", "down_proj"), joined(weights, layer), strict=True):
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = tensor.mT if transposed else tensor
    checkpoints.save(tmp_path, tensors, CONFIG)
    assert_reads(tmp_path, {name: tensor.float() for name, tensor in weights.items()})


def test_fused_fp8_gives_each_half_scales_of_its_own(tmp_path: Path) -> None:
    """transformers 5's `gate_up_proj_scale_inv`; 96 rows of gate are less than a block, and up starts a new one."""
    weights = {name: tensor.bfloat16().float() for name, tensor in checkpoints.weights().items()}
    tensors, meaning = dense_part({name: tensor.bfloat16() for name, tensor in weights.items()}), dict(weights)
    for layer in range(2):
        prefix = f"layers.{layer}.mlp.experts"
        for fused, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            codes, scales = [], []
            for expert in range(EXPERTS):
                for name in names:
                    weight = weights[f"{prefix}.{expert}.{name}.weight"]
                    blocks = block_scales(weight)
                    code, meaning[f"{prefix}.{expert}.{name}.weight"] = _fp8(weight, spread(blocks, weight))
                    codes.append(code)
                    scales.append(blocks)
            tensors[f"model.{prefix}.{fused}"] = torch.cat(codes).unflatten(0, (EXPERTS, -1))
            tensors[f"model.{prefix}.{fused}_scale_inv"] = torch.cat(scales).unflatten(0, (EXPERTS, -1))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoints.save(tmp_path, tensors, {**CONFIG, "quantization_config": config})
    assert_reads(tmp_path, meaning)


def test_gpt_oss_takes_turns_with_gate_and_up(tmp_path: Path) -> None:
    """Blocks and scales as OpenAI wrote them; also against transformers' own dequantization."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = checkpoints.weights()
    tensors, meaning = {}, {}
    for name, tensor in weights.items():
        if ".experts." not in name:
            tensors[f"model.{name}"], meaning[name] = tensor.bfloat16(), tensor.bfloat16().float()
    for layer in range(2):
        prefix = f"layers.{layer}.mlp.experts"
        gate_up, down = joined(weights, layer)
        turns = torch.stack(gate_up.chunk(2, 1), dim=2).flatten(1, 2)
        for name, matrices in (("gate_up_proj", turns), ("down_proj", down)):
            codes, scales, values = zip(*map(_mxfp4, matrices), strict=True)
            blocks, bytes_ = _in_pairs(torch.stack(codes)), torch.stack(scales)
            bias = torch.randn(EXPERTS, matrices.shape[1]).bfloat16()
            tensors |= {
                f"model.{prefix}.{name}_blocks": blocks,
                f"model.{prefix}.{name}_scales": bytes_,
                f"model.{prefix}.{name}_bias": bias,
            }
            theirs = convert_moe_packed_tensors(blocks, bytes_, dtype=torch.float32)
            assert torch.equal(theirs.mT, torch.stack(values)), "the writer means what transformers reads"
            halves = {"down_proj": slice(None)}
            if name == "gate_up_proj":
                halves = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
            for expert in range(EXPERTS):
                for half, rows in halves.items():
                    meaning[f"{prefix}.{expert}.{half}.weight"] = values[expert][rows]
                    meaning[f"{prefix}.{expert}.{half}.bias"] = bias[expert][rows].float()
    config = {**CONFIG, "architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    checkpoints.save(tmp_path, tensors, config)
    assert_reads(tmp_path, meaning)
    assert describe(Checkpoint.open(tmp_path)).text == "MXFP4 experts, BF16 dense"


def test_mixtral_calls_its_matrices_otherwise(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in checkpoints.weights().items()}
    renamed = {}
    for name, tensor in weights.items():
        name = f"model.{name}".replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    checkpoints.save(tmp_path, renamed, CONFIG)
    assert_reads(tmp_path, {name: tensor.float() for name, tensor in weights.items()})


def test_several_threads_read_the_same_numbers(tmp_path: Path) -> None:
    meaning = checkpoints.write(tmp_path, CONVENTIONS["compressed-nvfp4"])
    wrong: list[str] = []
    with SafetensorsSource(tmp_path) as source:

        def read() -> None:
            wrong.extend(
                n for n, expected in meaning.items() if not torch.equal(source.plain(n, expected.dtype), expected)
            )

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_sixteen_bit_copies_are_rounded_once(tmp_path: Path) -> None:
    meaning = checkpoints.write(tmp_path, CONVENTIONS["fp8-blocks"])
    name = "layers.1.mlp.experts.2.down_proj.weight"
    with SafetensorsSource(tmp_path) as source:
        assert source.tensors()[name].shape == (HIDDEN, INTERMEDIATE)
        assert torch.equal(source.plain(name, torch.bfloat16), meaning[name].bfloat16())
