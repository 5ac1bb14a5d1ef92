"""Times the expert kernels against each other and against what memory can deliver.

    python -m ftengine.kernels.bench [--hidden 576 --intermediate 1536 --experts 4 --top-k 2 --tokens 1 8 64 512]

Weights of several layers are used in turn, so that they come from memory as they do while serving. The best of the
repetitions counts: others on the machine only ever add time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ftengine.kernels import native, reference

POOL_BYTES = 256 << 20  # weights in rotation, more than any last-level cache in a desktop machine


@dataclass(frozen=True)
class Shape:
    """One MoE layer: H, I, E and K of the kernels' docstrings."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def expert_bytes(self, dtype: torch.dtype) -> int:
        return 3 * self.hidden * self.intermediate * dtype.itemsize


def best_seconds(call: Callable[[], object], budget: float) -> float:
    """The shortest of as many calls as fit into `budget` seconds, after one that does not count."""
    call()
    shortest = float("inf")
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def read_ceiling(budget: float) -> float:
    """Bytes per second of reading memory once, with torch's threads: the sum of an array larger than any cache."""
    values = torch.ones(POOL_BYTES, dtype=torch.float32)
    return values.nbytes / best_seconds(values.sum, budget)


def bench(shape: Shape, dtype: torch.dtype, tokens: int, threads: int, budget: float) -> dict[str, float]:
    """Seconds a layer, by implementation; under "bytes" the weights one layer must read, once each."""
    layers = max(1, POOL_BYTES // (shape.experts * shape.expert_bytes(dtype)))
    scale = shape.hidden**-0.5
    banks = [
        (
            (torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden) * scale).to(dtype),
            (torch.randn(shape.experts, shape.hidden, shape.intermediate) * scale).to(dtype),
        )
        for _ in range(layers)
    ]
    hidden = torch.randn(tokens, shape.hidden).to(dtype)
    ids = torch.rand(tokens, shape.experts).topk(shape.top_k).indices
    weights = torch.rand(tokens, shape.top_k)
    out = torch.zeros(tokens, shape.hidden)

    def all_layers(kernel: Callable[..., None]) -> Callable[[], None]:
        def call() -> None:
            for gate_up, down in banks:
                kernel(hidden, ids, weights, gate_up, down, out, threads)

        return call

    found = {"reference": best_seconds(all_layers(reference.moe_experts), budget) / layers}
    if native.AVAILABLE:
        found["native"] = best_seconds(all_layers(native.moe_experts), budget) / layers
    return found | {"bytes": float(len(set(ids.flatten().tolist())) * shape.expert_bytes(dtype))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the expert kernels.")
    for name, value in (("hidden", 576), ("intermediate", 1536), ("experts", 4), ("top-k", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    options = parser.parse_args()
    shape = Shape(options.hidden, options.intermediate, options.experts, options.top_k)
    torch.set_num_threads(options.threads)

    with torch.inference_mode():
        ceiling = read_ceiling(options.seconds)
        print(f"{shape}, {options.threads} threads, {', '.join(native.instruction_sets()) or native.REASON}")
        print(f"reading memory: {ceiling / 1e9:.1f} GB/s")
        for dtype in (torch.bfloat16, torch.float32):
            for tokens in options.tokens:
                found = bench(shape, dtype, tokens, options.threads, options.seconds)
                size = found.pop("bytes")
                flops = 6 * tokens * shape.top_k * shape.hidden * shape.intermediate
                for name, seconds in found.items():
                    print(
                        f"{str(dtype).removeprefix('torch.'):9} {tokens:5} tokens  {name:10} {seconds * 1e3:9.3f} ms"
                        f"  {size / seconds / 1e9:6.1f} GB/s  {size / seconds / ceiling:5.0%} of reading"
                        f"  {flops / seconds / 1e9:7.1f} GFLOP/s"
                    )


if __name__ == "__main__":
    main()
