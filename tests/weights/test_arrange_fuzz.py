"""Headers whose names, dtypes and shapes go together in no way: arranged soundly, or refused in a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.errors import CheckpointError
from ftengine.weights.arrange import arrange
from ftengine.weights.header import DTYPE_BITS, TensorEntry
from ftengine.weights.stored import Piece

LEAVES = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "bias"),
    *("input_scale", "pre_quant_scale", "x"),
)
FUSED = ("", "_blocks", "_scales", "_scale_inv", "_bias", "_weight_scale")
EXPERTS = "model.layers.0.mlp.experts"
NAMES = (
    *(f"model.layers.0.self_attn.q_proj.{leaf}" for leaf in LEAVES),
    *(f"{EXPERTS}.0.up_proj.{leaf}" for leaf in LEAVES),
    *(f"{EXPERTS}.{name}{end}" for name in ("gate_up_proj", "down_proj") for end in FUSED),
    *("weight", ".weight", "model.", "model.visual.weight", "lm_head.weight", f"{EXPERTS}.0.w1.weight"),
)
SIZES = st.sampled_from([0, 1, 2, 3, 16, 32, 64, 128, 256])


@dataclass
class Headers:
    """What arrange() asks a checkpoint for."""

    entries: dict[str, TensorEntry]
    architecture: str

    def tensors(self) -> dict[str, TensorEntry]:
        return self.entries


@st.composite
def headers(draw: st.DrawFn) -> Headers:
    entries = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(["U8", "F8_E4M3", "F32", "BF16", "F8_E8M0", "I32"]))
        shape = tuple(draw(st.lists(SIZES, max_size=4)))
        entries[name] = TensorEntry(name, dtype, shape, Path("x"), 0, math.prod(shape) * DTYPE_BITS[dtype] // 8)
    return Headers(entries, draw(st.sampled_from(["GptOssForCausalLM", "Qwen3MoeForCausalLM"])))


@settings(deadline=None, max_examples=400)
@given(headers())
def test_every_piece_lies_inside_its_tensor(checkpoint: Headers) -> None:
    try:
        arranged = arrange(checkpoint)
    except CheckpointError:
        return
    for stored in arranged.values():
        elements = math.prod(stored.shape)
        assert elements > 0
        assert bytes_of(stored.codes) == elements * stored.format.bits // 8
        for piece in (stored.scales, stored.second):
            assert piece is None or bytes_of(piece) > 0


def bytes_of(piece: Piece) -> int:
    shape = piece.entry.shape
    if piece.index is not None:
        assert piece.index < shape[0]
        shape = shape[1:]
    if piece.transposed:
        shape = shape[::-1]
    rows = len(range(shape[0])[piece.rows.slice]) if shape else 1
    assert piece.rows.last is None or piece.rows.last <= shape[0]
    return rows * math.prod(shape[1:]) * DTYPE_BITS[piece.entry.dtype] // 8
