"""GGUF weights as Hugging Face's checkpoint has them: against the tensors that the file was written from, against the
gguf package's own dequantization, and a whole model against transformers.

llama.cpp's real converter gives the same files: q35, qwen3moe and mixtral were compared tensor by tensor with it once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from ftengine.errors import CheckpointError
from ftengine.formats.format import BF16, NVFP4, Q4_0, Q8_0
from ftengine.formats.matrix import QuantMatrix
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.gguf_source import GgufSource
from ftengine.weights.gguf_types import TYPES
from tests.support import gguf_files
from tests.support.gguf_files import Values

T = GGMLQuantizationType
KEEPABLE = (T.Q4_0, T.Q8_0, T.MXFP4)
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10_000_000.0,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
}
KEYS, VALUES, SIZE = 2, 4, 32  # of Gated DeltaNet layers


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def e2m1(code: torch.Tensor) -> torch.Tensor:
    """OCP's table, spelled out."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return table[code.long()]


def spelled_out(matrix: QuantMatrix) -> torch.Tensor:
    """A QuantMatrix's values by the definition in formats/matrix.py, float32."""
    if matrix.scales is None:
        return matrix.codes.float()
    name = matrix.format.name
    if name == "q8_0":
        codes = matrix.codes.float()
    else:
        nibbles = torch.stack((matrix.codes & 15, matrix.codes >> 4), dim=-1).view(matrix.rows, matrix.columns)
        codes = e2m1(nibbles) if name in ("mxfp4", "nvfp4") else nibbles.float() - 8
    if name == "nvfp4":
        assert matrix.row_scales is not None
        scales = matrix.scales.view(torch.float8_e4m3fn).float() * matrix.row_scales[:, None]
        return codes * scales.repeat_interleave(16, dim=1)
    scales = matrix.scales.float()
    if name == "mxfp4":
        scales = torch.exp2(scales - 127)
    return codes * scales.repeat_interleave(32, dim=1)


def top(hidden: int) -> Values:
    return {
        "token_embd.weight": random(CONFIG["vocab_size"], hidden),
        "output_norm.weight": random(hidden, seed=1),
        "output.weight": random(CONFIG["vocab_size"], hidden, seed=2),
    }


def test_block_sizes_are_the_gguf_packages() -> None:
    assert {kind.number: (kind.elements, kind.bytes) for kind in TYPES.values()} == {
        int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()
    }
    assert {kind.name for kind in TYPES.values()} == {kind.name for kind in GGML_QUANT_SIZES}


def qwen3_settings(writer: GGUFWriter) -> None:
    gguf_files.common(writer, CONFIG)
    writer.add_feed_forward_length(128)
    writer.add_expert_feed_forward_length(96)


def qwen3(kind: Any = None) -> tuple[Values, Values]:
    """(as GGUF has it, as Hugging Face has it) of one layer's projections and experts."""
    stacked = {"gate": random(4, 96, 64, seed=3), "up": random(4, 96, 64, seed=4), "down": random(4, 64, 96, seed=5)}
    q = random(64, 64, seed=6)
    given = top(64) | {f"blk.0.ffn_{name}_exps.weight": values for name, values in stacked.items()}
    given |= {"blk.0.attn_q.weight": q, "blk.0.ffn_gate_inp.weight": random(4, 64, seed=7)}
    expected = {
        f"layers.0.mlp.experts.{expert}.{name}_proj.weight": values[expert]
        for name, values in stacked.items()
        for expert in range(4)
    }
    expected |= {"layers.0.self_attn.q_proj.weight": q, "lm_head.weight": given["output.weight"]}
    return given, expected


@pytest.mark.parametrize(
    "kind",
    [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4, T.IQ4_NL],
    ids=lambda kind: kind.name,
)
def test_every_block_type_gives_the_packages_numbers(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """IQ4_NL is read only by the package: its bytes are random."""
    given, expected = qwen3()
    stored = {}

    def encode(values: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(values)
        if kind == T.IQ4_NL:
            raw = np.random.default_rng(1).integers(0, 256, (*rows.shape[:-1], rows.shape[-1] // 32 * 18), np.uint8)
            raw.reshape(-1, 18)[:, 1] = 0x30  # the scale's exponent: a finite number
            return raw
        return quantize(rows, kind)

    writer = GGUFWriter(tmp_path / "x.gguf", "qwen3moe")
    qwen3_settings(writer)
    for name, values in given.items():
        raw = encode(values) if values.ndim > 1 else values
        stored[name] = np.asarray(dequantize(raw, kind), np.float32) if values.ndim > 1 else values
        writer.add_tensor(name, raw, raw_dtype=None if values.ndim == 1 or kind == T.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufSource(tmp_path / "x.gguf") as source:
        facts = source.tensors()
        for name in expected:
            match = re.fullmatch(r"layers\.0\.mlp\.experts\.(\d)\.(\w+)_proj\.weight", name)
            ggml = {"lm_head.weight": "output.weight", "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight"}
            reference = stored[f"blk.0.ffn_{match[2]}_exps.weight"][int(match[1])] if match else stored[ggml[name]]
            ours = source.plain(name, torch.float32)
            assert facts[name].shape == tuple(ours.shape) == reference.shape
            assert np.array_equal(ours.numpy(), reference), name
            matrix = source.matrix(name)
            assert matrix.format is facts[name].format
            if kind in KEEPABLE or kind in (T.F32, T.F16, T.BF16):
                assert np.array_equal(spelled_out(matrix).numpy(), reference), name
            else:
                assert matrix.format is BF16
                assert torch.equal(matrix.codes, torch.from_numpy(reference).bfloat16())


def test_types_that_no_one_dequantizes_are_named(tmp_path: Path) -> None:
    given, _ = qwen3()
    gguf_files.write(tmp_path / "x.gguf", "qwen3moe", qwen3_settings, given)
    raw = bytearray((tmp_path / "x.gguf").read_bytes())
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 16
    raw[at : at + 4] = (26).to_bytes(4, "little")  # I32: the same size
    (tmp_path / "x.gguf").write_bytes(raw)
    with GgufSource(tmp_path / "x.gguf") as source, pytest.raises(CheckpointError, match="GGUF type I32"):
        source.plain("layers.0.self_attn.q_proj.weight", torch.float32)


@pytest.mark.parametrize("kind", [T.F32, T.Q8_0, T.Q4_0], ids=lambda kind: kind.name)
def test_llama_row_order_is_undone(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    q, k = random(64, 64), random(32, 64, seed=1)
    bias = random(64, seed=2)
    given = top(64) | {
        "blk.0.attn_q.weight": gguf_files.rotary_rows(q, 4),
        "blk.0.attn_k.weight": gguf_files.rotary_rows(k, 2),
        "blk.0.attn_q.bias": gguf_files.rotary_rows(bias, 4),
        "blk.1.ffn_up.3.weight": random(96, 64, seed=3),
    }

    def settings(writer: GGUFWriter) -> None:
        gguf_files.common(writer, CONFIG)
        writer.add_feed_forward_length(96)

    path = tmp_path / "x.gguf"
    gguf_files.write(
        path, "llama", settings, given, lambda name: kind if name.endswith("weight") and "norm" not in name else T.F32
    )
    assert Checkpoint.open(path).architecture == "MixtralForCausalLM"
    with GgufSource(path) as source:
        for name, values in (("q", q), ("k", k)):
            reference = np.asarray(dequantize(quantize(values, kind), kind), np.float32)
            ours = source.plain(f"layers.0.self_attn.{name}_proj.weight", torch.float32)
            assert np.array_equal(ours.numpy(), reference)
            assert np.array_equal(
                spelled_out(source.matrix(f"layers.0.self_attn.{name}_proj.weight")).numpy(), reference
            )
        assert np.array_equal(source.plain("layers.0.self_attn.q_proj.bias", torch.float32).numpy(), bias)
        assert source.tensors()["layers.1.mlp.experts.3.up_proj.weight"].shape == (96, 64)


def delta_net() -> Values:
    """A Gated DeltaNet layer by canonical name."""
    channels = 2 * KEYS * SIZE + VALUES * SIZE
    return {
        "in_proj_qkv.weight": random(channels, 64),
        "in_proj_z.weight": random(VALUES * SIZE, 64, seed=1),
        "in_proj_b.weight": random(VALUES, 64, seed=2),
        "in_proj_a.weight": random(VALUES, 64, seed=3),
        "conv1d.weight": random(channels, 1, 4, seed=4),
        "dt_bias": random(VALUES, seed=5),
        "A_log": random(VALUES, seed=6),
        "norm.weight": random(SIZE, seed=7),
        "out_proj.weight": random(64, VALUES * SIZE, seed=8),
    }


def as_converted(layer: Values) -> Values:
    """By GGUF name and in llama.cpp's order, as its converter does it."""
    kept = 2 * KEYS * SIZE

    def heads(values: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
        return gguf_files.tiled(values, KEYS, VALUES, size, axis)

    def values_only(values: np.ndarray) -> np.ndarray:
        return np.concatenate((values[:kept], heads(values[kept:], SIZE)))

    return {
        "attn_qkv.weight": values_only(layer["in_proj_qkv.weight"]),
        "attn_gate.weight": heads(layer["in_proj_z.weight"], SIZE),
        "ssm_beta.weight": heads(layer["in_proj_b.weight"], 1),
        "ssm_alpha.weight": heads(layer["in_proj_a.weight"], 1),
        "ssm_conv1d.weight": values_only(layer["conv1d.weight"].squeeze(1)),
        "ssm_dt.bias": heads(layer["dt_bias"], 1),
        "ssm_a": -np.exp(heads(layer["A_log"], 1)),
        "ssm_norm.weight": layer["norm.weight"],
        "ssm_out.weight": heads(layer["out_proj.weight"], SIZE, axis=1),
    }


def qwen35_settings(writer: GGUFWriter) -> None:
    gguf_files.common(writer, CONFIG)
    writer.add_expert_feed_forward_length(96)
    writer.add_expert_shared_feed_forward_length(64)
    writer.add_rope_dimension_count(4)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(VALUES * SIZE)
    writer.add_ssm_state_size(SIZE)
    writer.add_ssm_time_step_rank(VALUES)
    writer.add_ssm_group_count(KEYS)
    writer.add_uint32("qwen35moe.full_attention_interval", 4)


@pytest.mark.parametrize("kind", [T.F32, T.Q8_0, T.Q4_0, T.MXFP4, T.Q5_1], ids=lambda kind: kind.name)
def test_delta_net_order_is_undone(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Also of quantized matrices: rows and whole blocks of columns move, codes do not change."""
    layer, norm = delta_net(), random(64, seed=9)
    quantized = ("attn_qkv.weight", "attn_gate.weight", "ssm_out.weight")
    given = top(64) | {f"blk.0.{name}": values for name, values in as_converted(layer).items()}
    given |= {"blk.0.attn_norm.weight": norm + 1, "blk.0.ffn_gate_inp_shexp.weight": random(64, seed=10)}
    path = tmp_path / "x.gguf"
    gguf_files.write(
        path, "qwen35moe", qwen35_settings, given, lambda name: kind if name.endswith(quantized) else T.F32
    )
    with GgufSource(path) as source:
        for name, values in layer.items():
            ours = source.plain(f"layers.0.linear_attn.{name}", torch.float32)
            assert tuple(ours.shape) == values.shape
            matrix = name in ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")
            reference = np.asarray(dequantize(quantize(values, kind), kind), np.float32) if matrix else values
            np.testing.assert_allclose(ours.numpy(), reference, rtol=0, atol=1e-6 if name == "A_log" else 0)
            if matrix and kind in KEEPABLE:
                assert np.array_equal(spelled_out(source.matrix(f"layers.0.linear_attn.{name}")).numpy(), reference)
        ours = source.plain("layers.0.input_layernorm.weight", torch.float32).numpy()
        np.testing.assert_allclose(ours, norm, rtol=0, atol=3e-7)
        assert source.tensors()["layers.0.mlp.shared_expert_gate.weight"].shape == (1, 64)
        assert source.matrix("layers.0.mlp.shared_expert_gate.weight").codes.shape == (1, 64)


def test_heads_smaller_than_a_block_are_not_torn(tmp_path: Path) -> None:
    """Columns that move within blocks cannot keep their scales: the matrix comes as BF16 numbers instead."""
    values = random(64, VALUES * 16)

    def settings(writer: GGUFWriter) -> None:
        qwen35_settings(writer)
        for key, value in (("inner_size", VALUES * 16), ("state_size", 16)):
            del writer.kv_data[0][f"qwen35moe.ssm.{key}"]
            writer.add_uint32(f"qwen35moe.ssm.{key}", value)

    given = top(64) | {"blk.0.ssm_out.weight": gguf_files.tiled(values, KEYS, VALUES, 16, axis=1)}
    gguf_files.write(
        tmp_path / "x.gguf", "qwen35moe", settings, given, lambda name: T.Q8_0 if "ssm_out" in name else T.F32
    )
    with GgufSource(tmp_path / "x.gguf") as source:
        matrix = source.matrix("layers.0.linear_attn.out_proj.weight")
        assert matrix.format is source.tensors()["layers.0.linear_attn.out_proj.weight"].format is BF16
        torch.testing.assert_close(matrix.codes.float(), torch.from_numpy(values), atol=0.05, rtol=0)


def test_fused_gate_and_up_and_scales(tmp_path: Path) -> None:
    fused, scale = random(4, 192, 64), np.array([1.0, 2.0, 0.5, 3.0], np.float32)
    given = top(64) | {"blk.0.ffn_gate_up_exps.weight": fused, "blk.0.ffn_gate_up_exps.scale": scale}
    gguf_files.write(tmp_path / "x.gguf", "qwen3moe", qwen3_settings, given)
    with GgufSource(tmp_path / "x.gguf") as source:
        for expert in range(4):
            for index, name in enumerate(("gate", "up")):
                ours = source.plain(f"layers.0.mlp.experts.{expert}.{name}_proj.weight", torch.float32)
                reference = fused[expert, 96 * index : 96 * (index + 1)] * scale[expert]
                assert np.array_equal(ours.numpy(), reference)


def test_nvfp4_keeps_codes_and_scales(tmp_path: Path) -> None:
    """Random bytes, as the package reads but cannot write them: all codes, all scales, also the one that is zero."""
    raw = np.random.default_rng(6).integers(0, 256, (4, 96, 36), np.uint8)
    raw[..., :4] &= 0x7F  # scales have no sign
    raw[:, :4, 0] = np.arange(0x7C, 0x80, dtype=np.uint8)
    values = np.asarray(dequantize(raw, T.NVFP4), np.float32)
    scale = np.array([1.0, 2.0, 0.5, 3.0], np.float32)
    writer = GGUFWriter(tmp_path / "x.gguf", "qwen3moe")
    qwen3_settings(writer)
    writer.add_tensor("blk.0.ffn_up_exps.weight", raw, raw_dtype=T.NVFP4)
    for name, plain in (top(64) | {"blk.0.ffn_up_exps.scale": scale}).items():
        writer.add_tensor(name, plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufSource(tmp_path / "x.gguf") as source:
        for expert in range(4):
            name = f"layers.0.mlp.experts.{expert}.up_proj.weight"
            reference = torch.from_numpy(values[expert] * scale[expert])
            assert torch.equal(source.plain(name, torch.float32), reference)
            matrix = source.matrix(name)
            assert matrix.format is source.tensors()[name].format is NVFP4
            assert torch.equal(spelled_out(matrix), reference)


def test_tensors_without_a_place_and_layers_beyond_the_model(tmp_path: Path) -> None:
    given, _ = qwen3()
    gguf_files.write(
        tmp_path / "x.gguf", "qwen3moe", qwen3_settings, given | {"blk.2.nextn.eh_proj.weight": random(2, 2)}
    )
    with GgufSource(tmp_path / "x.gguf") as source:
        assert not any("nextn" in name for name in source.tensors())
    gguf_files.write(tmp_path / "y.gguf", "qwen3moe", qwen3_settings, given | {"rope_freqs.weight": random(8)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has no place"):
        GgufSource(tmp_path / "y.gguf")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    given, _ = qwen3()
    path = tmp_path / "x.gguf"
    gguf_files.write(path, "qwen3moe", qwen3_settings, given)
    with GgufSource(path) as source:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        last = list(source.tensors())[-1]
        with pytest.raises(CheckpointError, match="it changed while it was read"):
            source.plain(last, torch.float32)


def test_keeping_is_exact_for_all_codes() -> None:
    """Every nibble and byte, through our order and back to GGUF's values."""
    from ftengine.weights.gguf_blocks import kept

    codes = np.arange(256, dtype=np.uint8).repeat(2).reshape(16, 32)
    half = np.frombuffer(np.float16(0.75).tobytes(), np.uint8)
    q8 = np.concatenate((np.tile(half, (16, 1)), codes), axis=1)
    ours = spelled_out(kept(q8, TYPES[8]))
    assert np.array_equal(ours.numpy(), dequantize(q8, T.Q8_0))
    assert kept(q8, TYPES[8]).format is Q8_0
    q4 = np.concatenate((np.tile(half, (32, 1)), codes.reshape(32, 16)), axis=1)
    assert np.array_equal(spelled_out(kept(q4, TYPES[2])).numpy(), dequantize(q4, T.Q4_0))
    assert kept(q4, TYPES[2]).format is Q4_0


def test_expert_tensors_of_another_count_and_impossible_heads(tmp_path: Path) -> None:
    given, _ = qwen3()
    gguf_files.write(
        tmp_path / "x.gguf", "qwen3moe", qwen3_settings, given | {"blk.1.ffn_up_exps.weight": random(5, 8, 32)}
    )
    with pytest.raises(CheckpointError, match=r"shape \[5, 8, 32\], which is not that of 4 experts"):
        GgufSource(tmp_path / "x.gguf")

    def no_heads(writer: GGUFWriter) -> None:
        gguf_files.common(writer, {**CONFIG, "num_attention_heads": 0})
        writer.add_feed_forward_length(96)

    gguf_files.write(tmp_path / "y.gguf", "llama", no_heads, top(64) | {"blk.0.attn_q.weight": random(64, 64)})
    with pytest.raises(CheckpointError, match="64 rows for 0 heads"):
        GgufSource(tmp_path / "y.gguf")
