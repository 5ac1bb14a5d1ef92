"""attention_decode against float64 softmax attention, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels.triton.attention_decode import DecodeWorkspace, attention_decode, splits
from tests.gpu.reference_mixers import attend, paged

CASES = [  # lengths, N, K, D, window, gated
    ([130], 8, 1, 64, 0, True),
    ([1, 77, 0, 16], 4, 2, 16, 0, True),
    ([17, 200], 6, 2, 32, 0, False),
    ([200, 5, 33], 4, 2, 32, 24, True),
    ([40], 2, 2, 128, 0, False),
    ([70], 16, 2, 256, 0, True),
    ([65], 20, 1, 32, 0, False),  # a group larger than a tile's 16 rows
]


def run(device, lengths, heads, kv_heads, dim, window, gated, dtype):
    cache = paged(lengths, kv_heads, dim, dtype, device)
    rows = len(lengths)
    queries = torch.randn(rows, heads, dim).to(dtype)
    wide = torch.randn(rows, heads * dim + 5)
    gate = wide[:, 5:] if gated else None
    workspace = DecodeWorkspace.allocate(rows, heads, kv_heads, dim, cache.table.shape[1] * 16, device)
    out = torch.full((rows, heads * dim), float("nan"), dtype=dtype, device=device)
    attention_decode(
        queries.to(device), cache.keys, cache.values, cache.table,
        torch.tensor(lengths, dtype=torch.int32, device=device), dim**-0.5, window,
        wide.to(device)[:, 5:] if gated else None, workspace, out,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        found = out[row].cpu().double()
        if length == 0:
            assert torch.equal(found, torch.zeros_like(found))
            continue
        own = slice(row, row + 1)
        expected = attend(queries[own], *cache.dense[row], length - 1, dim**-0.5, window, gate[own] if gated else None)[
            0
        ]
        yield found, expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(device, case):
    for found, expected in run(device, *case, torch.float32):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_bfloat16(device, case):
    for found, expected in run(device, *case, torch.bfloat16):
        assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_splits_fill_the_device_once():
    assert splits(2, 10**6, 132) == 64
    assert splits(16, 10**6, 132) == 8
    assert splits(64, 10**6, 24) == 1
    assert splits(1, 3, 132) == 2  # no more parts than blocks
