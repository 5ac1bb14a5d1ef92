"""prepare_heads against the torch layers (norm, rotary), and its angles against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftengine.kernels.triton.heads import Rope, prepare_heads
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.rotary import rotate
from tests.gpu.reference_mixers import half_unit

PAGE = 4


def run(device, tokens, heads, kv_heads, dim, rotary, norm, dtype, *, positions=None, spare=0, factor=1.0):
    """Queries, and the tokens' keys and values as found in the cache; expected likewise."""
    width = (heads + 2 * kv_heads) * dim
    projected = torch.randn(tokens, width + spare, device=device)[:, :width] * 3
    frequencies = (10000.0 ** (-torch.arange(rotary // 2, device=device) / (rotary // 2))).float()
    if positions is None:
        positions = torch.randint(0, 5000, (tokens,), dtype=torch.int32, device=device)
    pages = tokens // PAGE + 3
    slots = torch.randperm(pages * PAGE, device=device)[:tokens].int()
    keys, values = (torch.zeros(pages, PAGE, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
    queries = torch.empty(tokens, heads, dim, dtype=dtype, device=device)
    weight = torch.rand(heads + kv_heads, dim, device=device) + 0.5
    layer = (weight, 1e-6) if norm else None
    prepare_heads(projected, layer, Rope(frequencies, factor), positions, slots, keys, values, queries)

    parts = projected.reshape(tokens, -1, dim).cpu()
    turned = parts[:, : heads + kv_heads]
    if norm:
        turned = RmsNorm(weight.cpu(), 1e-6, torch.float32)(turned)
    angles = (positions.cpu().float()[:, None] * frequencies.cpu())[:, None].double()
    turned = rotate(turned, (angles.cos() * factor).float(), (angles.sin() * factor).float())
    found = queries, keys.flatten(0, 1)[slots.long()], values.flatten(0, 1)[slots.long()]
    untouched = keys.flatten(0, 1).abs().sum((1, 2)).eq(0).sum()
    assert untouched == pages * PAGE - tokens
    return [part.cpu().float() for part in found], [turned[:, :heads], turned[:, heads:], parts[:, heads + kv_heads :]]


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary", "norm", "spare"),
    [
        (3, 4, 2, 256, 64, True, 1024),
        (1, 2, 1, 128, 128, True, 0),
        (5, 3, 1, 64, 64, False, 0),
        (2, 2, 2, 16, 4, True, 7),
        (2, 2, 1, 32, 24, False, 0),
    ],
)
def test_float32(device, tokens, heads, kv_heads, dim, rotary, norm, spare):
    found, expected = run(device, tokens, heads, kv_heads, dim, rotary, norm, torch.float32, spare=spare, factor=1.3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once(device):
    found, expected = run(device, 4, 4, 2, 64, 32, True, torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=half_unit(device), atol=1e-6)


def test_angles_of_a_long_context(device):
    """A unit vector in the plane of each pair comes out as the cosine and sine of the float32 angle."""
    positions = torch.tensor([0, 1, 2, 3, 1000, 65535, 131071, 262143], dtype=torch.int32, device=device)
    tokens, half = len(positions), 32
    frequencies = (1e7 ** (-torch.arange(half, device=device) / half)).float()
    projected = torch.zeros(tokens, 3, 2 * half, device=device)
    projected[:, :2, :half] = 1.0
    keys = torch.zeros(2, PAGE, 1, 2 * half, device=device)
    queries = torch.empty(tokens, 1, 2 * half, device=device)
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    prepare_heads(projected.flatten(1), None, Rope(frequencies), positions, slots, keys, keys.clone(), queries)
    angles = (positions.cpu().float()[:, None] * frequencies.cpu()).double().numpy()
    expected = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    assert np.abs(queries[:, 0].cpu().numpy() - expected).max() < 2e-7
