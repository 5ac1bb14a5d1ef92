"""Layers against their formulas in float64, written out token by token here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ftengine.core import Batch, Capture
from ftengine.layers.attention import Attention
from ftengine.layers.delta_rule import CHUNK, chunked, recurrent_step
from ftengine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.rotary import RopeScaling, Rotary, inverse_frequencies, rotate, yarn_attention_factor
from ftengine.layers.step import QUERY_BLOCK, Step
from tests.models import packing

Tables = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def batch_of(lengths: list[int], contexts: list[int], page_size: int) -> Batch:
    """Pages of each sequence descend and interleave with the others', so that no sequence's are one run."""
    pages = [-(-(length + context) // page_size) for length, context in zip(lengths, contexts, strict=True)]
    widest, count = max(pages), len(pages)
    table = torch.zeros(count, widest, dtype=torch.int64)
    for index, used in enumerate(pages):
        table[index, :used] = torch.arange(used - 1, -1, -1) * count + index
    positions, slots = [], []
    for index, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        own = torch.arange(context, context + length)
        positions.append(own)
        slots.append(table[index, own // page_size] * page_size + own % page_size)
    return Batch(
        sequences=[],
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        positions=torch.cat(positions),
        query_lengths=lengths,
        context_lengths=contexts,
        page_table=table,
        slot_mapping=torch.cat(slots),
        state_slots=torch.arange(count).flip(0),
        logits_rows=torch.arange(0),
    )


@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64) * 7, torch.randn(shape[1:], dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    found = RmsNorm(weight.float(), 1e-5, torch.float32)(x.float())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rotary_dim", [16, 4])
def test_rotary_turns_pairs_as_complex_numbers(rotary_dim: int) -> None:
    """Pair (i, i + R/2) as one complex number times exp(i * position * theta^(-2i/R)); the rest passes."""
    heads, positions, half = torch.randn(6, 3, 16, dtype=torch.float64), torch.arange(6) * 100, rotary_dim // 2
    rotary = Rotary(RopeScaling(theta=10_000.0, rotary_dim=rotary_dim))
    found = rotate(heads.float(), *rotary.tables(positions)).double()
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) * 2 / rotary_dim)
    angle = positions.double()[:, None, None] * frequency
    turned = torch.complex(heads[..., :half], heads[..., half:rotary_dim]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag, heads[..., rotary_dim:]), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"kind": "llama3", "factor": 8.0, "original_context": 512},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0},
            {"kind": "yarn", "factor": 4.0, "original_context": 512, "attention_factor": yarn_attention_factor(4.0)},
        ),
        (
            {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
            {
                "kind": "yarn",
                "factor": 40.0,
                "original_context": 512,
                "truncate": False,
                "attention_factor": yarn_attention_factor(40.0, 1.0, 0.7),
            },
        ),
    ],
    ids=["linear", "llama3", "yarn", "yarn with mscale"],
)
def test_rotary_scalings_equal_transformers(parameters: dict[str, object], scaling: dict[str, object]) -> None:
    from transformers import MixtralConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_theta": 10_000.0, "original_max_position_embeddings": 512, **parameters}
    if parameters["rope_type"] == "linear":
        del given["original_max_position_embeddings"]
    config = MixtralConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=2048, rope_parameters=given
    )
    expected, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config)
    ours = RopeScaling(theta=10_000.0, rotary_dim=64, **scaling)  # type: ignore[arg-type]
    torch.testing.assert_close(inverse_frequencies(ours), expected, atol=0, rtol=1e-6)
    assert ours.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(
    ("lengths", "contexts"),
    [
        ([QUERY_BLOCK + 5, 1, 3], [40, 30, 0]),  # prefill and decode in one batch
        ([1, 1, 1, 1], [3, 20, 0, 19]),  # decode, one padded group
        ([1, 1], [5000, 2]),  # decode, lengths too different to pad
        ([1], [37]),
    ],
    ids=["mixed", "group", "uneven", "single"],
)
def test_attention_over_pages(lengths: list[int], contexts: list[int], window: int | None) -> None:
    """Softmax over each query's own visible keys, head by head, in float64."""
    heads, kv_heads, size, hidden, page_size = 6, 2, 8, 20, 4
    batch = batch_of(lengths, contexts, page_size)
    pages = int(batch.page_table.max()) + 1
    keys, values = torch.randn(2, pages, page_size, kv_heads, size)
    weight = torch.randn((heads + 2 * kv_heads) * size, hidden) / hidden**0.5
    out = packing.linear(torch.eye(heads * size))
    layer = Attention(packing.linear(weight), out, None, heads, kv_heads, size)
    tables = (torch.ones(len(batch.input_ids), 1, 4), torch.zeros(len(batch.input_ids), 1, 4))  # no turn
    states = torch.randn(len(batch.input_ids), hidden)
    found = layer(states, Step(batch, page_size, torch.float32, window), tables, keys, values)

    queries = (states.double() @ weight.double().T)[:, : heads * size].view(-1, heads, size)
    row = 0
    for index, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        own = torch.arange(context + length)
        slots = batch.page_table[index, own // page_size] * page_size + own % page_size
        k, v = (cache.double().flatten(0, 1)[slots] for cache in (keys, values))
        for position in range(context, context + length):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                group = head * kv_heads // heads
                scores = k[first : position + 1, group] @ queries[row, head] / math.sqrt(size)
                expected = scores.softmax(0) @ v[first : position + 1, group]
                got = found[row, head * size : (head + 1) * size].double()
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
            row += 1


def test_attention_keeps_pages_of_one_run_in_place() -> None:
    """No copy of the keys where a sequence's pages follow one another."""
    batch = batch_of([1], [30], 4)
    cache = torch.randn(20, 4, 2, 8)
    batch.page_table = torch.arange(5, 13).unsqueeze(0)
    step = Step(batch, 4, torch.float32)
    ((_, key_range),) = step.attention_spans
    assert key_range.of(cache).data_ptr() == cache[5].data_ptr()
    assert torch.equal(key_range.of(cache), cache[5:13].flatten(0, 1)[:31])


def delta_rule_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    s: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's recurrence for one head: query, key [T, Dk], value [T, Dv], decay, rate [T], s [Dk, Dv]."""
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, rate, strict=True):
        s = torch.exp(g) * s
        s = s + torch.outer(k, b * (v - k @ s))
        out.append(q @ s)
    return torch.stack(out), s


@pytest.mark.parametrize("tokens", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
@pytest.mark.parametrize("strong_decay", [False, True])
def test_delta_rule_in_chunks_and_by_step(tokens: int, strong_decay: bool) -> None:
    heads, dk, dv = 3, 8, 6
    query, key = (F.normalize(torch.randn(heads, tokens, dk, dtype=torch.float64), dim=-1) for _ in range(2))
    value, rate = torch.randn(heads, tokens, dv, dtype=torch.float64), torch.rand(heads, tokens, dtype=torch.float64)
    decay = -torch.rand(heads, tokens, dtype=torch.float64) * (30 if strong_decay else 0.2)
    start = torch.randn(heads, dk, dv, dtype=torch.float64)
    expected, last = zip(
        *(delta_rule_by_token(query[h], key[h], value[h], decay[h], rate[h], start[h]) for h in range(heads)),
        strict=True,
    )
    inputs = [part.float() for part in (query, key, value, decay, rate)]
    state = start.float()
    torch.testing.assert_close(chunked(*inputs, state).double(), torch.stack(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.double(), torch.stack(last), atol=1e-4, rtol=1e-4)

    state = start.float()
    stepped = torch.stack([recurrent_step(*(part[:, t] for part in inputs), state) for t in range(tokens)], dim=1)
    torch.testing.assert_close(stepped.double(), torch.stack(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.double(), torch.stack(last), atol=1e-4, rtol=1e-4)


def test_gated_delta_net_layer() -> None:
    """Two sequences that prefill and two of one token, from states of their own, with captures; in float64."""
    shape, hidden = DeltaNetShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6, kernel=4), 20
    channels, rows = shape.channels, shape.channels + shape.value_size + 2 * shape.value_heads
    weight, outward = torch.randn(rows, hidden) / hidden**0.5, torch.randn(hidden, shape.value_size) / 5
    layer = GatedDeltaNet(
        shape=shape,
        projection=packing.linear(weight),
        taps=torch.randn(4, channels),
        decay_scale=-torch.rand(4),
        decay_bias=torch.randn(4),
        norm=RmsNorm(torch.randn(6), 1e-6, torch.float32),
        out=packing.linear(outward),
    )
    lengths, contexts = [70, 1, 1, 9], [5, 11, 0, 0]
    batch = batch_of(lengths, contexts, 4)
    batch.captures = [Capture(0, 2, 5), Capture(0, 65, 4), Capture(2, 1, 8), Capture(3, 4, 6), Capture(3, 9, 7)]
    windows, states = torch.randn(9, 3, channels), torch.randn(9, 4, 8, 6)
    start_windows, start_states = windows.double(), states.double()
    inputs = torch.randn(sum(lengths), hidden)
    found = layer(inputs, Step(batch, 4, torch.float32), {"window": windows, "delta": states})

    projected = inputs.double() @ weight.double().T
    row = 0
    for index, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        slot = int(batch.state_slots[index])
        part = projected[row : row + length]
        mixed, gate, b, a = torch.split(part, [channels, shape.value_size, 4, 4], dim=1)
        history = torch.cat((start_windows[slot] * (context > 0), mixed))
        convolved = torch.stack([(history[t : t + 4] * layer.taps.double()).sum(0) for t in range(length)])
        q, k, v = torch.split(F.silu(convolved), [16, 16, 24], dim=1)
        kept = [capture for capture in batch.captures if capture.row == index]
        for capture in kept:
            torch.testing.assert_close(
                windows[capture.slot].double(), history[capture.tokens :][:3], atol=1e-5, rtol=1e-5
            )
        outputs = []
        for head in range(4):
            at = slice(head // 2 * 8, head // 2 * 8 + 8)
            rule = (
                F.normalize(q[:, at], dim=1) / math.sqrt(8),
                F.normalize(k[:, at], dim=1),
                v[:, head * 6 : head * 6 + 6],
                F.softplus(a[:, head] + layer.decay_bias[head]) * layer.decay_scale[head],
                torch.sigmoid(b[:, head]),
            )
            start = start_states[slot, head] * (context > 0)
            out, state = delta_rule_by_token(*rule, start)
            for capture in kept:
                _, reached = delta_rule_by_token(*(part[: capture.tokens] for part in rule), start)
                torch.testing.assert_close(states[capture.slot, head].double(), reached, atol=1e-4, rtol=1e-4)
            normed = out / (out.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm.weight
            outputs.append(normed * F.silu(gate[:, head * 6 : head * 6 + 6]))
            torch.testing.assert_close(states[slot, head].double(), state, atol=1e-4, rtol=1e-4)
        expected = torch.cat(outputs, dim=1) @ outward.double().T
        torch.testing.assert_close(found[row : row + length].double(), expected, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(windows[slot].double(), history[-3:], atol=1e-5, rtol=1e-5)
        row += length
