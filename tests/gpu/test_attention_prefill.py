"""attention_prefill against float64 softmax attention, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels.triton.attention_prefill import attention_prefill
from tests.gpu.reference_mixers import attend, paged

CASES = [  # (new tokens, context) of each sequence, N, K, D, window, gated
    ([(40, 0)], 4, 1, 64, 0, True),
    ([(5, 30), (1, 77), (0, 20), (33, 0)], 4, 2, 16, 0, True),
    ([(20, 50)], 3, 1, 32, 0, False),
    ([(40, 13), (1, 60), (3, 0)], 4, 2, 32, 24, True),
    ([(17, 7)], 2, 2, 128, 0, False),
    ([(9, 20)], 8, 1, 256, 0, True),
    ([(6, 3)], 34, 1, 16, 5, False),  # more heads share a key head than a tile has rows
]


def run(device, chunks, heads, kv_heads, dim, window, gated, dtype):
    lengths = [new + context for new, context in chunks]
    cache = paged(lengths, kv_heads, dim, dtype, device)
    starts = [0]
    for new, _ in chunks:
        starts.append(starts[-1] + new)
    queries = torch.randn(starts[-1], heads, dim).to(dtype)
    wide = torch.randn(starts[-1], heads * dim + 5)
    gate = wide[:, 5:] if gated else None
    out = torch.full((starts[-1], heads * dim), float("nan"), dtype=dtype, device=device)
    attention_prefill(
        queries.to(device), cache.keys, cache.values, cache.table,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([context for _, context in chunks], dtype=torch.int32, device=device),
        max(new for new, _ in chunks), dim**-0.5, window, wide.to(device)[:, 5:] if gated else None, out,
    )  # fmt: skip
    for (_, context), first, last, dense in zip(chunks, starts[:-1], starts[1:], cache.dense, strict=True):
        rows = slice(first, last)
        expected = attend(queries[rows], *dense, context, dim**-0.5, window, gate[rows] if gated else None)
        yield out[rows].cpu().double(), expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(device, case):
    for found, expected in run(device, *case, torch.float32):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_bfloat16(device, case):
    for found, expected in run(device, *case, torch.bfloat16):
        if len(expected):
            assert (found - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.slow  # in the interpreter
def test_long_chunks_in_bfloat16(device):
    """Tiles of every kind: full, diagonal, past the chunk's end."""
    for found, expected in run(device, [(300, 200), (130, 0)], 4, 2, 64, 0, True, torch.bfloat16):
        assert (found - expected).abs().max() < 0.01 * expected.abs().max()
