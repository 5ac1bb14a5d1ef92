"""Checkpoints that cannot be read: one sentence that names the tensor or the method, before any weight is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.quantization import check_method, describe
from ftengine.weights.safetensors_source import SafetensorsSource
from tests.weights import checkpoints
from tests.weights.checkpoints import CONFIG
from tests.weights.conventions import CONVENTIONS, Tensors

EXPERT = "model.layers.0.mlp.experts.1.up_proj"


MODELOPT, COMPRESSED, FP8 = ({"quant_method": method} for method in ("modelopt", "compressed-tensors", "fp8"))
LAYERS = {"layers.0": {"quant_algo": "W4A16_AWQ"}}
INTEGERS = {"group_0": {"weights": {"type": "int", "num_bits": 8}}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "the method 'gptq'"),
        ({"quant_method": "awq"}, "the method 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the method 'bitsandbytes'"),
        ({"load_in_8bit": True}, "a method that it does not name"),
        ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, "ModelOpt's NVFP4_AWQ"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}, "ModelOpt's W4A16_AWQ"),
        ({**COMPRESSED, "format": "pack-quantized"}, "compressed-tensors' pack-quantized"),
        ({**COMPRESSED, "config_groups": INTEGERS}, "compressed-tensors' int weights"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"u": {}}}}, "compressed-tensors' rotations"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**FP8, "weight_block_size": [64, 64]}, "FP8 in blocks of"),
        ({**FP8, "fmt": "e5m2"}, "FP8 as e5m2"),
    ],
)
def test_a_method_that_is_not_read_is_said_at_once(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """No weight file exists here at all."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"which is not read: BF16.*GGUF") as caught:
        check_method(Checkpoint.open(tmp_path))
    assert words in str(caught.value)
    assert caught.value.next_step
    with pytest.raises(CheckpointError, match="which is not read"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        [1],
        {"quant_method": "modelopt", "quantized_layers": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": 1}},
        {"quant_method": ["fp8"]},
        {"quant_method": "compressed-tensors", "transform_config": [], "sparsity_config": 3, "format": {}},
    ],
)
def test_a_configuration_of_other_types_is_a_sentence_too(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    with pytest.raises(CheckpointError):
        SafetensorsSource(tmp_path)


def broken(tmp_path: Path, convention: str, change: Tensors, drop: tuple[str, ...] = ()) -> Path:
    checkpoints.write(tmp_path, CONVENTIONS[convention])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in {**tensors, **change}.items() if name not in drop}
    checkpoints.save(tmp_path, tensors, {**CONFIG, "quantization_config": CONVENTIONS[convention].config})
    return tmp_path


@pytest.mark.parametrize(
    ("convention", "leaf", "tensor", "message"),
    [
        ("modelopt-nvfp4", "weight_scale", None, f"{EXPERT}.weight is U8, and its weight_scale is missing"),
        ("modelopt-nvfp4", "weight_scale_2", None, f"{EXPERT}.weight is U8, and its weight_scale_2 is missing"),
        ("modelopt-nvfp4", "weight", None, f"{EXPERT}.weight_scale scales a weight that is missing"),
        ("modelopt-nvfp4", "weight_scale", torch.ones(96, 9).to(torch.float8_e4m3fn), "expected [96, 10]"),
        ("modelopt-nvfp4", "weight_scale", torch.ones(96, 10), f"{EXPERT}.weight_scale has dtype F32"),
        ("modelopt-nvfp4", "weight_scale_2", torch.ones(96), f"{EXPERT}.weight_scale_2 has shape [96], expected one"),
        ("modelopt-nvfp4", "weight_scale_2", torch.ones(()).half(), f"{EXPERT}.weight_scale_2 has dtype F16"),
        ("modelopt-nvfp4", "weight_global_scale", torch.ones(1), "contradict each other"),
        ("modelopt-nvfp4", "pre_quant_scale", torch.ones(160), f"{EXPERT}.pre_quant_scale belongs to a quant"),
        ("modelopt-nvfp4", "weight", torch.zeros(96, 80).to(torch.int8), f"{EXPERT}.weight has dtype I8"),
        ("modelopt-nvfp4", "weight", torch.zeros(96, 160).bfloat16(), f"{EXPERT}.weight is BF16, and {EXPERT}.weight_"),
        ("modelopt-nvfp4", "weight", torch.zeros(96, 160).to(torch.float8_e4m3fn), "has no place beside it"),
        ("modelopt-nvfp4", "weight_scale", torch.zeros(0, 10).to(torch.float8_e4m3fn), "is empty"),
        ("fp8-blocks", "weight_scale_inv", None, f"{EXPERT}.weight is F8_E4M3, and its weight_scale is missing"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            torch.ones(2, 2),
            f"{EXPERT}.weight_scale_inv has shape [2, 2]; FP8 is read",
        ),
        ("fp8-blocks", "weight_scale_inv", torch.ones(1, 2).int(), f"{EXPERT}.weight_scale_inv has dtype I32"),
        ("fp8-blocks", "weight", torch.zeros(96, 160).to(torch.float8_e5m2), f"{EXPERT}.weight has dtype F8_E5M2"),
        ("fp8-blocks", "weight", torch.zeros(96).to(torch.float8_e4m3fn), f"{EXPERT}.weight is F8_E4M3 and not a matr"),
        ("fp8-blocks", "weight_packed", torch.zeros(96, 80).to(torch.uint8), "contradict each other"),
        ("compressed-mxfp4", "weight_scale", torch.zeros(96, 4).to(torch.uint8), "expected [96, 5]"),
        ("plain", "weight", torch.zeros(96, 160).int(), f"{EXPERT}.weight has dtype I32"),
        ("plain", "qweight", torch.zeros(1).int(), f"{EXPERT}.qweight belongs to a quantization that is not read"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, convention: str, leaf: str, tensor: torch.Tensor | None, message: str
) -> None:
    name = f"{EXPERT}.{leaf}"
    folder = broken(tmp_path, convention, {name: tensor} if tensor is not None else {}, (name,) * (tensor is None))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(folder)
    assert message in str(caught.value)


FUSED = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("gate_up", "down", "more", "message"),
    [
        ((3, 192, 160), (3, 160, 64), {}, "are not one layer's experts"),
        ((3, 192, 160), (2, 160, 96), {}, "are not one layer's experts"),
        ((192, 160), (3, 160, 96), {}, "which no layer's experts are"),
        ((3, 192, 160), None, {}, f"{FUSED.removeprefix('model.')}.down_proj is missing"),
        ((3, 192, 160), (3, 160, 96), {"gate_up_proj_weight_scale": (3, 1)}, "a form of experts that is not read"),
        ((3, 192, 160), (3, 160, 96), {"down_proj_bias": (3, 161)}, "expected [3, 160]"),
        ((3, 192, 160), (3, 160, 96), {"down_proj_scale_inv": (3, 2, 1)}, "would scale it"),
        ((3, 192, 160), (3, 160, 96), {"0.up_proj.weight": (96, 160)}, "are the same one"),
    ],
)
def test_fused_experts_that_do_not_fit_are_named(
    tmp_path: Path,
    gate_up: tuple[int, ...],
    down: tuple[int, ...] | None,
    more: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    shapes = {"gate_up_proj": gate_up, **({"down_proj": down} if down else {}), **more}
    tensors = {f"{FUSED}.{name}": torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    checkpoints.save(tmp_path, tensors, CONFIG)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "gate_up", "down"),
    [
        (torch.uint8, (3, 192, 80), (3, 160, 48)),  # Llama 4's NVFP4 is transposed besides
        (torch.float8_e4m3fn, (3, 160, 192), (3, 96, 160)),
        (torch.float8_e4m3fn, (1 << 17, 2, 1), (1 << 17, 1, 1)),
    ],
)
def test_fused_experts_in_other_orders_are_refused(
    tmp_path: Path, dtype: torch.dtype, gate_up: tuple[int, ...], down: tuple[int, ...]
) -> None:
    tensors = {"gate_up_proj": torch.zeros(gate_up), "down_proj": torch.zeros(down)}
    checkpoints.save(tmp_path, {f"{FUSED}.{name}": tensor.to(dtype) for name, tensor in tensors.items()}, CONFIG)
    with pytest.raises(CheckpointError, match=r"no layer's experts are|order of rows that is not read"):
        SafetensorsSource(tmp_path)


def test_fused_fp8_needs_scales_that_both_halves_can_share(tmp_path: Path) -> None:
    codes = {"gate_up_proj": (3, 192, 160), "down_proj": (3, 160, 96)}
    tensors = {f"{FUSED}.{name}": torch.zeros(shape).to(torch.float8_e4m3fn) for name, shape in codes.items()}
    for scales, message in (((3, 3, 2), "not even for gate and up"), ((2, 2, 2), "missing or of a form")):
        change = {
            f"{FUSED}.gate_up_proj_scale_inv": torch.ones(scales),
            f"{FUSED}.down_proj_scale_inv": torch.ones(3, 2, 1),
        }
        checkpoints.save(tmp_path, {**tensors, **change}, CONFIG)
        with pytest.raises(CheckpointError, match=message):
            SafetensorsSource(tmp_path)


def test_a_second_scale_of_zero_is_said_where_it_is_read(tmp_path: Path) -> None:
    """One over it would make every weight of the matrix infinite."""
    folder = broken(tmp_path, "compressed-nvfp4", {f"{EXPERT}.weight_global_scale": torch.zeros(1)})
    with SafetensorsSource(folder) as source, pytest.raises(CheckpointError, match="weight_global_scale is no scale"):
        source.matrix("layers.0.mlp.experts.1.up_proj.weight")


def test_what_a_source_does_not_have(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, CONVENTIONS["plain"])
    with SafetensorsSource(tmp_path) as source:
        with pytest.raises(CheckpointError, match=r"x\.weight is missing"):
            source.matrix("x.weight")
        with pytest.raises(CheckpointError, match="is not a matrix"):
            source.matrix("norm.weight")
        assert source.expert_layout(0) is None


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A memory map would end the process here."""
    checkpoints.write(tmp_path, CONVENTIONS["fp8-blocks"])
    with SafetensorsSource(tmp_path) as source:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(60_000)
        with pytest.raises(CheckpointError, match="ended inside the tensor"):
            _ = [source.plain(name, torch.float32) for name in source.tensors()]


def test_describing_a_checkpoint_loads_no_torch(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, CONVENTIONS["modelopt-mixed"])
    code = (
        "import sys; from ftengine.weights.checkpoint import Checkpoint; "
        "from ftengine.weights.quantization import describe; "
        f"text = describe(Checkpoint.open({str(tmp_path)!r})).text; "
        "print(text if 'torch' not in sys.modules else 'torch was loaded')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == describe(Checkpoint.open(tmp_path)).text
