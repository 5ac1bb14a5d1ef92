"""One small checkpoint in every convention that makers of quantized models have, written here from their documents.

Each writer turns a weight into what that maker's file holds for it, and says what those numbers mean in float32.
Nothing of ftengine is used. Scales that a maker would find by calibration are any numbers here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Written:
    """tensors: what the file gets for a weight, by the end of its name; meaning: float32, of the weight's shape."""

    tensors: Tensors
    meaning: torch.Tensor


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """Codes 0..15."""
    return (values[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, e4m3 scales, the second scale, meaning."""
    second = weight.abs().amax() / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 / second).to(torch.float8_e4m3fn)
    codes = _nearest(groups / (scales.float() * second)[..., None])
    meaning = (E2M1[codes.int()] * scales.float()[..., None] * second).flatten(1)
    return _in_pairs(codes.flatten(1)), scales, second, meaning


def modelopt_nvfp4(weight: torch.Tensor) -> Written:
    packed, scales, second, meaning = _nvfp4(weight)
    rest = {"input_scale": torch.tensor(0.01)}
    return Written({"weight": packed, "weight_scale": scales, "weight_scale_2": second, **rest}, meaning)


def modelopt_w4a16(weight: torch.Tensor) -> Written:
    packed, scales, second, meaning = _nvfp4(weight)
    return Written({"weight": packed, "weight_scale": scales, "weight_scale_2": second}, meaning)


def compressed_nvfp4(weight: torch.Tensor) -> Written:
    """weight_global_scale divides. A power of two, so that one over it is exact and the meaning is not in doubt."""
    second = weight.abs().amax() / (6 * 448)
    second = torch.exp2(second.log2().ceil())
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 / second).to(torch.float8_e4m3fn)
    codes = _nearest(groups / (scales.float() * second)[..., None])
    meaning = (E2M1[codes.int()] * (scales.float() / (1 / second))[..., None]).flatten(1)
    rest = {"weight_global_scale": (1 / second).view(1), "input_global_scale": torch.ones(1)}
    return Written({"weight_packed": _in_pairs(codes.flatten(1)), "weight_scale": scales, **rest}, meaning)


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, groups, 32], scale bytes [rows, groups], meaning."""
    groups = weight.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(2).log2().floor() - 2).int()
    codes = _nearest(groups * torch.exp2(-exponent.float())[..., None])
    meaning = torch.ldexp(E2M1[codes.int()], exponent[..., None]).flatten(1)
    return codes, (exponent + 127).to(torch.uint8), meaning


def compressed_mxfp4(weight: torch.Tensor) -> Written:
    codes, scales, meaning = _mxfp4(weight)
    return Written({"weight_packed": _in_pairs(codes.flatten(1)), "weight_scale": scales}, meaning)


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def fp8_per_tensor(weight: torch.Tensor) -> Written:
    scale = weight.abs().amax() / 448
    codes, meaning = _fp8(weight, scale)
    return Written({"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, meaning)


def fp8_per_channel(weight: torch.Tensor) -> Written:
    """compressed-tensors keeps a column of BF16 scales."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes, meaning = _fp8(weight, scale.float())
    return Written({"weight": codes, "weight_scale": scale}, meaning)


def modelopt_per_channel(weight: torch.Tensor) -> Written:
    scale = weight.abs().amax(1) / 448
    codes, meaning = _fp8(weight, scale[:, None])
    return Written({"weight": codes, "weight_scale": scale}, meaning)


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    blocks = [
        [weight[r : r + 128, c : c + 128].abs().amax() / 448 for c in range(0, columns, 128)]
        for r in range(0, rows, 128)
    ]
    return torch.tensor(blocks)


def spread(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]


def fp8_blocks(weight: torch.Tensor) -> Written:
    """The form of DeepSeek and Qwen: `weight_scale_inv` multiplies in spite of its name."""
    scales = block_scales(weight)
    codes, meaning = _fp8(weight, spread(scales, weight))
    return Written({"weight": codes, "weight_scale_inv": scales}, meaning)


def fp8_blocks_of_powers(weight: torch.Tensor) -> Written:
    """scale_fmt "ue8m0"."""
    scales = torch.exp2(block_scales(weight).log2().ceil()).to(torch.float8_e8m0fnu)
    codes, meaning = _fp8(weight, spread(scales.float(), weight))
    return Written({"weight": codes, "weight_scale_inv": scales}, meaning)


def modelopt_blocks(weight: torch.Tensor) -> Written:
    """FP8_PB_WO keeps axes of one between those of the blocks."""
    scales = block_scales(weight)
    codes, meaning = _fp8(weight, spread(scales, weight))
    return Written({"weight": codes, "weight_scale": scales[:, None, :, None]}, meaning)


def compressed_blocks(weight: torch.Tensor) -> Written:
    scales = block_scales(weight).bfloat16()
    codes, meaning = _fp8(weight, spread(scales.float(), weight))
    return Written({"weight": codes, "weight_scale": scales}, meaning)


def bf16(weight: torch.Tensor) -> Written:
    return Written({"weight": weight.bfloat16()}, weight.bfloat16().float())


Writer = Callable[[torch.Tensor], Written]


@dataclass(frozen=True)
class Convention:
    """A maker's form: how expert weights and all other matrices of the layers are written, and the configuration."""

    experts: Writer
    dense: Writer
    config: dict[str, Any] | None  # quantization_config
    export: dict[str, Any] | None  # hf_quant_config.json's
    text: str  # what a person is told


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, "dynamic": False, **weights}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head"], "transform_config": {}, "sparsity_config": {}}


MIXED = {
    "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

CONVENTIONS: dict[str, Convention] = {
    "plain": Convention(bf16, bf16, None, None, "BF16"),
    "modelopt-nvfp4": Convention(
        modelopt_nvfp4, bf16, _modelopt("NVFP4"), None, "NVFP4 experts (ModelOpt), BF16 dense"
    ),
    "modelopt-mixed": Convention(
        modelopt_w4a16,
        fp8_per_tensor,
        _modelopt("MIXED_PRECISION", quantized_layers=MIXED, kv_cache_scheme={"num_bits": 8}),
        None,
        "NVFP4 experts (ModelOpt), FP8 and BF16 dense",
    ),
    "modelopt-export-only": Convention(
        modelopt_nvfp4,
        modelopt_nvfp4,
        None,
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
        "NVFP4 experts (ModelOpt), NVFP4 and BF16 dense",
    ),
    "modelopt-fp8": Convention(
        fp8_per_tensor, fp8_per_tensor, _modelopt("FP8"), None, "FP8 experts (ModelOpt), FP8 and BF16 dense"
    ),
    "modelopt-fp8-channel": Convention(
        modelopt_per_channel,
        modelopt_per_channel,
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        None,
        "FP8 experts (ModelOpt), FP8 and BF16 dense",
    ),
    "modelopt-fp8-blocks": Convention(
        modelopt_blocks,
        modelopt_blocks,
        _modelopt("fp8_pb_wo"),
        None,
        "block FP8 experts (ModelOpt), block FP8 and BF16 dense",
    ),
    "compressed-nvfp4": Convention(
        compressed_nvfp4,
        compressed_nvfp4,
        _compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
        None,
        "NVFP4 experts (compressed-tensors), NVFP4 and BF16 dense",
    ),
    "compressed-mxfp4": Convention(
        compressed_mxfp4,
        bf16,
        _compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
        None,
        "MXFP4 experts (compressed-tensors), BF16 dense",
    ),
    "compressed-fp8-channel": Convention(
        fp8_per_channel,
        fp8_per_channel,
        _compressed("float-quantized", num_bits=8, strategy="channel"),
        None,
        "FP8 experts (compressed-tensors), FP8 and BF16 dense",
    ),
    "compressed-fp8-tensor": Convention(
        fp8_per_tensor,
        bf16,
        _compressed("float-quantized", num_bits=8, strategy="tensor"),
        None,
        "FP8 experts (compressed-tensors), BF16 dense",
    ),
    "compressed-fp8-blocks": Convention(
        compressed_blocks,
        compressed_blocks,
        _compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]),
        None,
        "block FP8 experts (compressed-tensors), block FP8 and BF16 dense",
    ),
    "fp8-blocks": Convention(fp8_blocks, fp8_blocks, FP8_CONFIG, None, "block FP8 experts, block FP8 and BF16 dense"),
    "fp8-blocks-ue8m0": Convention(
        fp8_blocks_of_powers,
        fp8_blocks,
        {**FP8_CONFIG, "scale_fmt": "ue8m0"},
        None,
        "block FP8 experts, block FP8 and BF16 dense",
    ),
}
