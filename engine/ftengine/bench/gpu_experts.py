"""`python -m ftengine.bench.gpu_experts`: a layer's experts on the GPU, each candidate configuration against the bytes.

Calls run in a CUDA graph, one after the other on other experts, so that the L2 cache holds none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_experts", __doc__)

import torch

from ftengine.bench.layer import Shape
from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import FORMATS, Format
from ftengine.formats.pack import pack_expert
from ftengine.formats.quantize import quantize
from ftengine.kernels.triton import experts
from ftengine.kernels.triton.buffers import Chosen
from ftengine.kernels.triton.grouped import experts_grouped
from ftengine.kernels.triton.launch import PDL
from ftengine.kernels.triton.route_order import order_routes

DIFFERENT = 4  # experts of different numbers; slot s holds number s % DIFFERENT
CALLS, REPLAYS = 24, 10
CEILING = 4.3e12  # bytes a second that an H200 reads at best


@dataclass(frozen=True)
class Case:
    """Experts in slots, and routes of `tokens` tokens to other ones in each call."""

    shape: Shape
    format: Format
    tokens: int
    blocks: torch.Tensor  # uint8 [experts, block_bytes]
    plain: list[list[torch.Tensor]]  # gate, up, down of the different ones, float32
    chosen: list[Chosen]
    x: torch.Tensor

    @property
    def used(self) -> float:
        """Different experts a call."""
        return sum(int(chosen.count) for chosen in self.chosen) / len(self.chosen)

    def formula(self, chosen: Chosen) -> torch.Tensor:
        """float32 [T, H] with float32 weights; activations between the products rounded as kernels round them."""
        out = torch.zeros(self.tokens, self.shape.hidden, device="cuda")
        for u in range(int(chosen.count)):
            gate, up, down = self.plain[int(chosen.slot[u]) % DIFFERENT]
            x = self.x.float()
            act = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)).to(self.x.dtype).float()
            out += chosen.combine[u, : self.tokens, None] * (act @ down.T)
        return out


def blocks_of(shape: Shape, format: Format) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    layout, packed, plain = shape.layout(format), [], []
    for _ in range(DIFFERENT):
        sizes = [(shape.intermediate, shape.hidden)] * 2 + [(shape.hidden, shape.intermediate)]
        gate, up, down = (quantize(torch.randn(size) * size[1] ** -0.5, format) for size in sizes)
        plain.append([dequantize(part).cuda() for part in (gate, up, down)])
        packed.append(pack_expert(layout, gate, up, down).cuda())
    return torch.stack(packed).repeat(shape.experts // DIFFERENT, 1), plain


def routes(shape: Shape, tokens: int, calls: int) -> list[Chosen]:
    """For one token no expert comes twice before all others have come."""
    generator, found = torch.Generator().manual_seed(0), []
    order = torch.randperm(shape.experts, generator=generator)
    for call in range(calls):
        if tokens == 1:
            ids = order.roll(-call * shape.top_k)[: shape.top_k].view(1, -1)
        else:
            ids = torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k).indices
        used = torch.unique(ids)
        chosen = Chosen.allocate(tokens, shape.top_k, "cuda")
        chosen.count.fill_(len(used))
        chosen.slot[: len(used)] = used.int().cuda()
        taken = (ids.T[:, None, :] == used[None, :, None]).any(0).float()
        chosen.combine[: len(used)] = (taken / shape.top_k).cuda()
        found.append(chosen)
    return found


def microseconds(calls: Sequence[Callable[[], None]]) -> float:
    """A call, in a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / (REPLAYS * len(calls))


def bench(case: Case, show_all: bool) -> None:
    shape, layout, tokens = case.shape, case.shape.layout(case.format), case.tokens
    scratch = torch.zeros(tokens * shape.top_k, tokens, shape.intermediate, dtype=case.x.dtype, device="cuda")
    out = torch.zeros(tokens, shape.hidden, device="cuda")
    candidates = [
        experts.candidates(case.format, columns, tokens, case.x, first)
        for columns, first in ((shape.hidden, True), (shape.intermediate, False))
    ]
    if not show_all:
        candidates = [found[:1] for found in candidates]
    gate_up_bytes = case.used * layout.down_offset
    best: list[dict[str, Any]] = []
    for name, found, size in (
        ("gate_up", candidates[0], gate_up_bytes),
        ("down", candidates[1], case.used * layout.used_bytes - gate_up_bytes),
    ):
        timed: list[tuple[float, int, dict[str, Any]]] = []
        for config in found:
            if name == "gate_up":
                call = partial(
                    experts._gate_up, layout, case.blocks, x=case.x, scratch=scratch, config=config, early=False
                )
            else:
                call = partial(experts._down, layout, case.blocks, scratch=scratch, out=out, config=config)
            try:
                time = microseconds([partial(call, chosen) for chosen in case.chosen])
            except Exception as error:  # shows which candidate does not fit, and why
                print(f"{case.format.name:10} T={tokens:<3} {name:8} {config}: {type(error).__name__}: {error}")
                continue
            timed.append((time, len(timed), config))
            report(case, name, size, time, str(config))
        best.append(min(timed)[2])

    def both(chosen: Chosen) -> None:
        experts._gate_up(layout, case.blocks, chosen, case.x, scratch, best[0], early=False)
        experts._down(layout, case.blocks, chosen, scratch, out, best[1])

    worst = 0.0
    for chosen in case.chosen[:2]:
        out.zero_()
        both(chosen)
        expected = case.formula(chosen)
        worst = max(worst, float((out - expected).abs().max() / expected.abs().max()))
    time = microseconds([partial(both, chosen) for chosen in case.chosen])
    report(case, "both", case.used * layout.used_bytes, time, f"U = {case.used:.0f}, relative error {worst:.1e}")


def bench_grouped(
    shape: Shape, format: Format, tokens: int, blocks: torch.Tensor, plain: list[list[torch.Tensor]]
) -> None:
    """Random routes; checked on the first tokens."""
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    slots = torch.rand(tokens, shape.experts, device="cuda").topk(shape.top_k).indices.int()
    weights, out = torch.rand(tokens, shape.top_k, device="cuda"), torch.zeros(tokens, shape.hidden, device="cuda")

    def once() -> None:
        experts_grouped(shape.layout(format), blocks, order_routes(slots), x, weights, out)

    once()
    expected = torch.zeros(4, shape.hidden, device="cuda")
    for token in range(4):
        for weight, slot in zip(weights[token], slots[token].tolist(), strict=True):
            gate, up, down = plain[slot % DIFFERENT]
            act = torch.nn.functional.silu(gate @ x[token].float()) * (up @ x[token].float())
            expected[token] += weight * (down @ act)
    error = float((out[:4] - expected).abs().max() / expected.abs().max())
    time = microseconds([once] * 4)
    flops = 6 * tokens * shape.top_k * shape.hidden * shape.intermediate
    ordering = microseconds([lambda: (order_routes(slots), None)[1]] * 4)
    print(
        f"{format.name:10} T={tokens:<5} grouped {time:8.0f} us {flops / time / 1e6:5.0f} TFLOP/s, of which "
        f"{ordering:.0f} us order routes, relative error {error:.1e}",
        flush=True,
    )


def report(case: Case, name: str, size: float, time: float, note: str) -> None:
    rate = size / time * 1e6
    print(
        f"{case.format.name:10} T={case.tokens:<3} {name:8} {time:8.2f} us {rate / 1e9:7.0f} GB/s "
        f"{rate / CEILING:5.0%}  {note}",
        flush=True,
    )


def main() -> None:
    arguments = parse("gpu_experts", __doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = Shape(hidden=arguments.hidden, intermediate=arguments.intermediate, top_k=arguments.top_k)
    print(f"{torch.cuda.get_device_name()}, {shape}, PDL {PDL}")
    for name in arguments.formats:
        format = FORMATS[name]
        blocks, plain = blocks_of(shape, format)
        for tokens in arguments.tokens:
            x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
            bench(Case(shape, format, tokens, blocks, plain, routes(shape, tokens, CALLS), x), arguments.all)
        for tokens in arguments.grouped:
            bench_grouped(shape, format, tokens, blocks, plain)
        del blocks


if __name__ == "__main__":
    main()
