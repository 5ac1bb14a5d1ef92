"""Gated DeltaNet over chunks against the paper's recurrence in float64, token by token."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels.triton.captures import Captures, keep_states
from ftengine.kernels.triton.delta_prefill import Chunk, delta_prefill
from tests.gpu.reference_mixers import delta_net, half_unit
from tests.gpu.test_delta_step import layer_of, on


def run(device, shape, lengths, dtype, places=()):
    """Chunks of sequences one after the other, in two steps of which the second goes on from the first; rows of no
    chunk lie between. Yields found and expected: rows, then windows and states.

    places: of each sequence, after how many tokens of both steps its window and state are captured.
    """
    _, value_heads, key_dim, value_dim, taps = shape
    layer = layer_of(*shape)
    channels, values = layer.taps.shape[1], value_heads * value_dim
    count = len(lengths) + sum(map(len, places)) + 1
    windows = torch.full((count, taps - 1, channels), float("nan"), device=device)
    states = torch.full((count, value_heads, key_dim, value_dim), float("nan"), device=device)
    slots = torch.randperm(count).tolist()
    expected = [
        (torch.zeros(taps - 1, channels).double(), torch.zeros(value_heads, key_dim, value_dim).double())
        for _ in lengths
    ]
    for step in range(2):
        chunks, row, free = [], 1, iter(slots[len(lengths) :])
        kept = [[(tokens, next(free)) for tokens in own] for own in places]
        for number, (length, slot) in enumerate(zip(lengths, slots, strict=False)):
            captures = captures_of(kept[number], device) if places and places[number] else None
            chunks.append(Chunk(row, length, slot, step == 0, captures))
            row += length + 1
        projected = torch.randn(row, channels + values + 2 * value_heads + 2)[:, 2:]
        out = torch.full((row, values), 7.0, dtype=dtype, device=device)
        delta_prefill(on(layer, device), projected.to(device), windows, states, chunks, out)
        assert (out[0] == 7.0).all()
        for number, chunk in enumerate(chunks):
            rows = slice(chunk.row, chunk.row + chunk.length)
            for tokens, slot in kept[number] if places else ():
                reached = slice(chunk.row, chunk.row + tokens)
                _, window, state = delta_net(layer, projected[reached].double(), *expected[number], *shape[:4])
                torch.testing.assert_close(windows[slot].cpu().double(), window, rtol=0, atol=0)
                yield states[slot].cpu().double(), state
            wanted, *after = delta_net(layer, projected[rows].double(), *expected[number], *shape[:4])
            expected[number] = tuple(after)
            yield out[rows].cpu().double(), wanted
            assert (out[rows.stop] == 7.0).all()
    for slot, after in zip(slots, expected, strict=False):
        torch.testing.assert_close(windows[slot].cpu().double(), after[0], rtol=0, atol=0)
        yield states[slot].cpu().double(), after[1]
    assert windows[slots[-1]].isnan().all()
    assert states[slots[-1]].isnan().all()


def captures_of(kept, device):
    return Captures(torch.tensor(kept, dtype=torch.int32, device=device), len(kept))


@pytest.mark.parametrize(
    ("shape", "lengths", "places"),
    [
        ((2, 4, 16, 16, 4), [1, 34, 2], [[1], [1, 2, 17, 33, 34], []]),  # Nk, Nv, Dk, Dv, W
        ((1, 3, 8, 24, 3), [33], [[32, 32]]),
        ((1, 1, 128, 128, 4), [5, 3], ()),
    ],
)
def test_float32(device, shape, lengths, places):
    for found, expected in run(device, shape, lengths, torch.float32, places):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_bfloat16(device):
    for found, expected in run(device, (1, 2, 64, 64, 4), [20], torch.bfloat16, [[7, 19]]):
        assert (found - expected).abs().max() < 4 * half_unit(device) * expected.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the library's kernels need a CUDA device")
def test_long_chunks_in_bfloat16(device):
    pytest.importorskip("fla", reason="fla-core is not installed")
    places = [[1, 63, 64, 65, 200, 299, 300], [64], [1], []]
    for found, expected in run(device, (2, 4, 128, 128, 4), [300, 64, 65, 1], torch.bfloat16, places):
        assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_from_corrections(device, dtype):
    """keep_states, given the recurrence's own corrections, against the recurrence in float64."""
    tokens, key_heads, value_heads, key_dim, value_dim = 150, 1, 2, 24, 40
    key = torch.nn.functional.normalize(torch.randn(tokens, key_heads, key_dim), dim=-1).to(dtype)
    corrections = torch.randn(tokens, value_heads, value_dim).to(dtype)
    decay = -torch.rand(tokens, value_heads) * torch.tensor([0.02, 3.0])
    states = torch.full((8, value_heads, key_dim, value_dim), float("nan"))
    states[5] = torch.randn(states[5].shape)
    kept = [(1, 4), (63, 0), (64, 7), (64, 1), (130, 2), (150, 6)]
    expected, running = {}, states[5].double()
    for token in range(tokens):
        added = key[token].double().repeat_interleave(value_heads, 0)[:, :, None] * corrections[token].double()[:, None]
        running = running * decay[token].double().exp()[:, None, None] + added
        expected.update({slot: running for after, slot in kept if after == token + 1})
    states = states.to(device)
    inputs = (part.to(device) for part in (key, decay, corrections))
    keep_states(*inputs, states[5].clone(), states, captures_of(kept, device))
    for slot, state in expected.items():
        error = (states[slot].cpu().double() - state).abs().max() / state.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2 * half_unit(device))
    assert states[3].isnan().all()
