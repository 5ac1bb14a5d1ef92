"""Attention, Gated DeltaNet and what is around them on the GPU: time, bytes per second, error against torch.

    python -m ftengine.bench.gpu_mixers [--tiles]   # attention with each of several tiles, or all cases

Each decode case is a captured graph of a chain of layers, each with its own cache or state, so that the L2 cache of
the GPU does not serve them. Shapes are Qwen3.6's. Bytes are the least that must be moved.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_mixers", __doc__)

import torch
import torch.nn.functional as F
import triton

from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.attention_decode import DecodeWorkspace, attention_decode
from ftengine.kernels.triton.attention_prefill import attention_prefill
from ftengine.kernels.triton.captures import Captures
from ftengine.kernels.triton.delta_net import DeltaWorkspace, conv_delta_step
from ftengine.kernels.triton.delta_prefill import Chunk, delta_prefill
from ftengine.kernels.triton.heads import Rope, prepare_heads
from ftengine.kernels.triton.portable import Tile
from ftengine.layers.delta_rule import recurrent_step
from ftengine.layers.gated_delta_net import L2_EPSILON

HEADS, KV_HEADS, DIM, PAGE = 16, 2, 256, 16
KEY_HEADS, VALUE_HEADS, SIDE, TAPS = 16, 32, 128, 4
CHANNELS, VALUES = (2 * KEY_HEADS + VALUE_HEADS) * SIDE, VALUE_HEADS * SIDE
LAYERS, REPLAYS = 20, 20
DECODE_TILES = [Tile(16, *rest) for rest in ((64, 4, 2), (64, 4, 3), (64, 8, 2), (32, 4, 2), (32, 4, 3), (128, 8, 2))]
PREFILL_TILES = [
    Tile(*numbers)
    for numbers in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2), (128, 128, 8, 1))
]
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    name: str
    bytes: int  # a call
    error: float  # largest, beside the largest value
    calls: list[Callable[[], None]]
    flops: float = 0.0


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def captured(calls: list[Callable[[], None]]) -> float:
    """Microseconds a call, the median of some replays."""
    torch.cuda.synchronize()  # the inputs are there
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
    return statistics.median(times) * 1e3 / len(calls)


def attention_inputs(batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's keys, values and page table [batch, pages], pages in random order."""
    pages = -(-context // PAGE)
    table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
    shape = (batch * pages, PAGE, KV_HEADS, DIM)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return keys, values, table


def attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, length: int
) -> torch.Tensor:
    """Of the first `length` keys of one sequence, float32: queries [T, N, D] -> [T, N * D]; causal if T > 1."""
    keys, values = (part[pages.long()].flatten(0, 1)[:length].transpose(0, 1).float() for part in (keys, values))
    groups = queries.transpose(0, 1).float()
    out = F.scaled_dot_product_attention(groups, keys, values, is_causal=len(queries) > 1, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


def decode_attention(batch: int, context: int, tile: Tile | None = None) -> Case:
    queries = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    gate = torch.randn(batch, HEADS * DIM, device=DEVICE)
    lengths = integers(*[context] * batch)
    # The table is as wide as for a long context: what is not used must cost nothing.
    workspace = DecodeWorkspace.allocate(batch, HEADS, KV_HEADS, DIM, 262144, DEVICE)
    out = torch.empty(batch, HEADS * DIM, dtype=torch.bfloat16, device=DEVICE)
    calls: list[Callable[[], None]] = []
    error = 0.0
    for layer in range(LAYERS):
        keys, values, table = attention_inputs(batch, context)
        wide = F.pad(table, (0, 262144 // PAGE - table.shape[1]))

        def call(keys: torch.Tensor = keys, values: torch.Tensor = values, table: torch.Tensor = wide) -> None:
            attention_decode(queries, keys, values, table, lengths, DIM**-0.5, 0, gate, workspace, out, tile)

        calls.append(call)
        if layer == 0:
            call()
            rows = [attended(queries[row : row + 1], keys, values, table[row], context) for row in range(batch)]
            error = relative(out, torch.cat(rows) * gate.sigmoid())
    return Case(f"attention_decode B={batch} context {context}", batch * context * KV_HEADS * DIM * 4, error, calls)


def heads(tokens: int) -> Case:
    width = (HEADS + 2 * KV_HEADS) * DIM
    projected = torch.randn(tokens, width + HEADS * DIM, device=DEVICE)
    weight = torch.rand(HEADS + KV_HEADS, DIM, device=DEVICE)
    rope = Rope(1e7 ** (-torch.arange(32, device=DEVICE) / 32))
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE) + 100_000
    cache = [torch.empty(tokens // PAGE + 1, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    queries = torch.empty(tokens, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(tokens, dtype=torch.int32, device=DEVICE)

    def call() -> None:
        prepare_heads(projected, (weight, 1e-6), rope, positions, slots, cache[0], cache[1], queries)

    call()
    parts = projected.view(tokens, -1, DIM)[:, : HEADS + KV_HEADS]
    normed = F.rms_norm(parts, (DIM,), None, 1e-6) * weight
    angle = (positions.float()[:, None, None] * rope.frequencies).double()
    first, second = normed[..., :32], normed[..., 32:64]
    turned = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
    error = relative(queries[..., :64], turned[:, :HEADS])
    return Case(f"prepare_heads T={tokens}", tokens * width * 6, error, [call] * LAYERS)


def delta_layer() -> DeltaNet:
    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=DEVICE)

    return DeltaNet(random(TAPS, CHANNELS) - 0.5, -random(VALUE_HEADS), random(VALUE_HEADS), random(SIDE), 1e-6)


def delta_reference(
    layer: DeltaNet, projected: torch.Tensor, windows: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """One token of each sequence, from its window and state, which stay as they are."""
    mixed, gate, rate, decay = torch.split(projected, [CHANNELS, VALUES, VALUE_HEADS, VALUE_HEADS], 1)
    convolved = F.silu((torch.cat((windows, mixed[:, None]), 1) * layer.taps).sum(1))
    query, key, value = torch.split(convolved, [KEY_HEADS * SIDE, KEY_HEADS * SIDE, VALUES], 1)
    query, key = (
        (part / (part.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt()).repeat_interleave(2, 1).view(-1, SIDE)
        for part in (query.view(-1, KEY_HEADS, SIDE), key.view(-1, KEY_HEADS, SIDE))
    )
    core = recurrent_step(
        query * SIDE**-0.5, key, value.reshape(-1, SIDE),
        (F.softplus(decay + layer.decay_bias) * layer.decay_scale).flatten(), rate.sigmoid().flatten(),
        states.clone().flatten(0, 1),
    )  # fmt: skip
    core = F.rms_norm(core, (SIDE,), layer.norm, layer.epsilon)
    return core.reshape(len(projected), VALUES) * F.silu(gate)


def delta_decode(batch: int) -> Case:
    projected = torch.randn(batch, CHANNELS + VALUES + 2 * VALUE_HEADS, device=DEVICE)
    slots, fresh = torch.arange(batch, dtype=torch.int32, device=DEVICE), integers(*[0] * batch)
    workspace = DeltaWorkspace.allocate(batch, KEY_HEADS, VALUE_HEADS, SIDE, DEVICE)
    out = torch.empty(batch, VALUES, dtype=torch.bfloat16, device=DEVICE)
    calls: list[Callable[[], None]] = []
    error = 0.0
    for number in range(LAYERS if batch > 4 else 3 * LAYERS):  # states of more than the L2 cache
        layer = delta_layer()
        windows = torch.randn(batch, TAPS - 1, CHANNELS, device=DEVICE)
        states = torch.randn(batch, VALUE_HEADS, SIDE, SIDE, device=DEVICE)
        expected = delta_reference(layer, projected, windows, states) if number == 0 else None

        def call(layer: DeltaNet = layer, windows: torch.Tensor = windows, states: torch.Tensor = states) -> None:
            conv_delta_step(layer, projected, windows, states, slots, fresh, workspace, out)

        calls.append(call)
        if expected is not None:
            call()
            error = relative(out, expected)
    moved = batch * 4 * (2 * VALUE_HEADS * SIDE * SIDE + (2 * TAPS - 1) * CHANNELS) + 4 * TAPS * CHANNELS
    return Case(f"conv_delta_step B={batch}", moved, error, calls)


def delta_chunk(tokens: int, captures: int = 0) -> Case:
    """Error: of the state after it and of captured ones, against a step of decoding a token."""
    layer = delta_layer()
    projected = torch.randn(tokens, CHANNELS + VALUES + 2 * VALUE_HEADS, device=DEVICE)
    out = torch.empty(tokens, VALUES, dtype=torch.bfloat16, device=DEVICE)
    windows, states = (
        torch.zeros(1 + captures, *shape, device=DEVICE) for shape in ((TAPS - 1, CHANNELS), (VALUE_HEADS, SIDE, SIDE))
    )
    # The last one at the chunk's end, the others at no multiple of anything.
    ends = [tokens * number // captures - 7 * (captures - number) for number in range(1, captures + 1)]
    places = dict(zip(ends, range(1, captures + 1), strict=True))
    numbers = [number for place in (*places.items(), (0, 0)) for number in place]
    kept = Captures(integers(*numbers).view(-1, 2), captures)

    def call() -> None:
        delta_prefill(layer, projected, windows, states, [Chunk(0, tokens, 0, True, kept)], out)

    call()
    other = [torch.zeros_like(part) for part in (windows[:1], states[:1])]
    errors = []
    workspace = DeltaWorkspace.allocate(1, KEY_HEADS, VALUE_HEADS, SIDE, DEVICE)
    row, slot = torch.empty(1, VALUES, dtype=torch.bfloat16, device=DEVICE), integers(0)
    for token in range(tokens):
        conv_delta_step(layer, projected[token : token + 1], other[0], other[1], slot, slot, workspace, row)
        if token + 1 in places:
            errors.append(relative(states[places[token + 1]], other[1][0]))
    errors.append(relative(states[0], other[1][0]))
    moved = tokens * (4 * (CHANNELS + VALUES) + 2 * VALUES)
    name = f"delta_prefill T={tokens}" + (f" {captures} captures" if captures else "")
    return Case(name, moved, max(errors), [call] * 4)


def prefill_attention(tokens: int, context: int, tile: Tile | None = None) -> Case:
    keys, values, table = attention_inputs(1, tokens + context)
    queries = torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    gate = torch.randn(tokens, HEADS * DIM, device=DEVICE)
    out = torch.empty(tokens, HEADS * DIM, dtype=torch.bfloat16, device=DEVICE)
    starts, before = integers(0, tokens), integers(context)

    def call() -> None:
        attention_prefill(queries, keys, values, table, starts, before, tokens, DIM**-0.5, 0, gate, out, tile)

    call()
    error = float("nan")
    if context == 0:  # torch counts rows from the first key
        few = min(tokens, 1024)
        expected = attended(queries[:few], keys, values, table[0], few) * gate[:few].sigmoid()
        error = relative(out[:few], expected)
    seen = tokens * context + tokens * (tokens + 1) / 2
    moved = tokens * HEADS * DIM * 8 + (tokens + context) * KV_HEADS * DIM * 4
    return Case(f"attention_prefill T={tokens} after {context}", moved, error, [call] * 4, 4.0 * seen * HEADS * DIM)


@functools.cache
def ceiling() -> float:
    """GB/s of the GPU's memory: what torch reads of 4 GiB."""
    source = torch.zeros(1 << 30, device=DEVICE)
    total = torch.empty((), device=DEVICE)

    def read() -> None:
        torch.sum(source, dim=0, out=total)

    return source.numel() * 4 / captured([read] * 4) / 1e3


def main() -> None:
    options = parse("gpu_mixers", __doc__)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, memory read at {ceiling():.0f} GB/s")
    if options.tiles:
        for tile in DECODE_TILES:
            report(f"{tile}", [partial(decode_attention, *shape, tile) for shape in ((1, 4096), (1, 32768), (8, 4096))])
        for tile in PREFILL_TILES:
            report(f"{tile}", [partial(prefill_attention, 8192, 0, tile)])
        return
    cases = [partial(heads, tokens) for tokens in (1, 8, 8192)]
    cases += [partial(decode_attention, *shape) for shape in ((1, 100), (1, 4096), (1, 32768), (8, 4096), (16, 1000))]
    cases += [partial(delta_decode, batch) for batch in (1, 4, 8, 16)]
    cases += [partial(prefill_attention, *shape) for shape in ((8192, 0), (2048, 30000), (64, 4096))]
    cases += [partial(delta_chunk, tokens) for tokens in (16, 512, 8192)]
    cases += [partial(delta_chunk, tokens, 8) for tokens in (512, 8192)]
    report("Qwen3.6's layers", cases)


def report(title: str, makers: Sequence[Callable[[], Case]]) -> None:
    best = ceiling()
    print(f"{title}\n{'case':42} {'us':>9} {'GB/s':>7} {'share':>6} {'TFLOP/s':>8} {'error':>9}")
    for make in makers:
        try:
            case = make()
            time = captured(case.calls)
        except triton.runtime.errors.OutOfResources as error:
            print(f"does not fit: {error}")
            continue
        rate = case.bytes / time / 1e3
        work = case.flops / time / 1e6
        print(f"{case.name:42} {time:9.2f} {rate:7.0f} {rate / best:6.0%} {work:8.0f} {case.error:9.1e}", flush=True)


if __name__ == "__main__":
    main()
