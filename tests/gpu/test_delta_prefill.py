"""Gated DeltaNet over chunks against the paper's recurrence in float64, token by token."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels.triton.delta_prefill import Chunk, delta_prefill
from tests.gpu.reference_mixers import delta_net, half_unit
from tests.gpu.test_delta_step import layer_of, on


def run(device, shape, lengths, dtype):
    """Chunks of sequences one after the other, in two steps of which the second goes on from the first; rows of no
    chunk lie between. Yields found and expected: rows, then windows and states."""
    _, value_heads, key_dim, value_dim, taps = shape
    layer = layer_of(*shape)
    channels, values = layer.taps.shape[1], value_heads * value_dim
    windows = torch.full((len(lengths) + 1, taps - 1, channels), float("nan"), device=device)
    states = torch.full((len(lengths) + 1, value_heads, key_dim, value_dim), float("nan"), device=device)
    slots = torch.randperm(len(lengths) + 1).tolist()
    expected = [
        (torch.zeros(taps - 1, channels).double(), torch.zeros(value_heads, key_dim, value_dim).double())
        for _ in lengths
    ]
    for step in range(2):
        chunks, row = [], 1
        for length, slot in zip(lengths, slots, strict=False):
            chunks.append(Chunk(row, length, slot, fresh=step == 0))
            row += length + 1
        projected = torch.randn(row, channels + values + 2 * value_heads + 2)[:, 2:]
        out = torch.full((row, values), 7.0, dtype=dtype, device=device)
        delta_prefill(on(layer, device), projected.to(device), windows, states, chunks, out)
        assert (out[0] == 7.0).all()
        for number, chunk in enumerate(chunks):
            rows = slice(chunk.row, chunk.row + chunk.length)
            wanted, *after = delta_net(layer, projected[rows].double(), *expected[number], *shape[:4])
            expected[number] = tuple(after)
            yield out[rows].cpu().double(), wanted
            assert (out[rows.stop] == 7.0).all()
    for slot, after in zip(slots, expected, strict=False):
        torch.testing.assert_close(windows[slot].cpu().double(), after[0], rtol=0, atol=0)
        yield states[slot].cpu().double(), after[1]
    assert windows[slots[-1]].isnan().all()
    assert states[slots[-1]].isnan().all()


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((2, 4, 16, 16, 4), [1, 34, 2]),  # Nk, Nv, Dk, Dv, W
        ((1, 3, 8, 24, 3), [33]),
        ((1, 1, 128, 128, 4), [5, 3]),
    ],
)
def test_float32(device, shape, lengths):
    for found, expected in run(device, shape, lengths, torch.float32):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_bfloat16(device):
    for found, expected in run(device, (1, 2, 64, 64, 4), [20], torch.bfloat16):
        assert (found - expected).abs().max() < 4 * half_unit(device) * expected.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the library's kernels need a CUDA device")
def test_long_chunks_in_bfloat16(device):
    pytest.importorskip("fla", reason="fla-core is not installed")
    for found, expected in run(device, (2, 4, 128, 128, 4), [300, 64, 65, 1], torch.bfloat16):
        assert (found - expected).norm() < 0.01 * expected.norm()
