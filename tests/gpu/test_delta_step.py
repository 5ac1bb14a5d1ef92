"""Decode steps of Gated DeltaNet against the paper's recurrence in float64, over several steps."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.delta_net import DeltaWorkspace, conv_delta_step
from tests.gpu.reference_mixers import delta_net, half_unit

SHAPES = [  # Nk, Nv, Dk, Dv, W
    (2, 4, 16, 16, 4),
    (1, 2, 128, 128, 4),
    (2, 6, 8, 48, 2),
    (3, 3, 32, 64, 3),
]


def layer_of(key_heads, value_heads, key_dim, value_dim, taps):
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaNet(
        taps=torch.randn(taps, channels),
        decay_scale=-torch.rand(value_heads) * 4,
        decay_bias=torch.randn(value_heads) - 2,
        norm=torch.rand(value_dim) + 0.5,
        epsilon=1e-6,
    )


def on(layer, device):
    moved = (part.to(device) for part in (layer.taps, layer.decay_scale, layer.decay_bias, layer.norm))
    return DeltaNet(*moved, epsilon=layer.epsilon)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps(device, shape):
    key_heads, value_heads, key_dim, value_dim, taps = shape
    layer = layer_of(*shape)
    channels, values = layer.taps.shape[1], value_heads * value_dim
    width = channels + values + 2 * value_heads
    # Row 0 goes on from a state, row 1 begins in a slot that holds NaN, row 2 is padding in the dummy slot 4.
    windows, states = torch.randn(5, taps - 1, channels), torch.randn(5, value_heads, key_dim, value_dim)
    windows[1], states[1] = float("nan"), float("nan")
    slots = torch.tensor([3, 1, 4], dtype=torch.int32, device=device)
    expected = [(windows[3].double(), states[3].double())]
    expected.append(tuple(torch.zeros_like(part) for part in expected[0]))
    others = windows[[0, 2]].clone(), states[[0, 2]].clone()
    windows, states = windows.to(device), states.to(device)
    workspace = DeltaWorkspace.allocate(4, key_heads, value_heads, value_dim, device)
    out = torch.empty(3, values, device=device)
    for number in range(3):
        wide = torch.randn(3, width + 3)
        fresh = torch.tensor([0, int(number == 0), 1], dtype=torch.int32, device=device)
        conv_delta_step(on(layer, device), wide.to(device)[:, 3:], windows, states, slots, fresh, workspace, out)
        for row in range(2):
            rows, *after = delta_net(layer, wide[row : row + 1, 3:].double(), *expected[row], *shape[:4])
            expected[row] = tuple(after)
            torch.testing.assert_close(out[row].cpu().double(), rows[0], rtol=2e-4, atol=2e-5)
            slot = int(slots[row])
            torch.testing.assert_close(windows[slot].cpu().double(), after[0], rtol=0, atol=0)
            torch.testing.assert_close(states[slot].cpu().double(), after[1], rtol=1e-5, atol=1e-5)
    assert not workspace.arrivals.any()
    assert torch.equal(windows[[0, 2]].cpu(), others[0])
    assert torch.equal(states[[0, 2]].cpu(), others[1])


def test_bfloat16_rounds_the_result_only(device):
    shape = (1, 2, 16, 16, 4)
    layer = layer_of(*shape)
    windows, states = torch.randn(1, 3, layer.taps.shape[1]), torch.randn(1, 2, 16, 16)
    projected = torch.randn(1, layer.taps.shape[1] + 36)
    rows, _, _ = delta_net(layer, projected.double(), windows[0].double(), states[0].double(), *shape[:4])
    slots, fresh = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    workspace = DeltaWorkspace.allocate(1, 1, 2, 16, device)
    out = torch.empty(1, 32, dtype=torch.bfloat16, device=device)
    moved = projected.to(device), windows.to(device), states.to(device)
    conv_delta_step(on(layer, device), *moved, slots, fresh, workspace, out)
    torch.testing.assert_close(out[0].cpu().double(), rows[0], rtol=half_unit(device), atol=1e-4)
