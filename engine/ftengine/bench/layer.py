"""Times one layer of routed experts against the bytes that it must read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ftengine import _native
from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import ExpertLayout, Format, padded
from ftengine.formats.pack import ExpertBiases, pack_expert
from ftengine.formats.quantize import quantize

REPEATS = 5
LEAST_SECONDS = 0.04  # of one repeat: calls are added until it takes that long


@dataclass(frozen=True)
class Shape:
    """The default is a layer of Qwen3.6-35B-A3B."""

    experts: int = 256
    intermediate: int = 512
    hidden: int = 2048
    top_k: int = 8

    def layout(self, format: Format) -> ExpertLayout:
        return ExpertLayout(self.hidden, self.intermediate, format, format)

    def bank_bytes(self, format: Format) -> int:
        return self.experts * self.layout(format).block_bytes


@dataclass(frozen=True)
class Timing:
    """Medians of REPEATS. read: bytes of the experts that one call uses, each counted once."""

    format: str
    batch: int
    threads: int
    milliseconds: float
    read: int

    @property
    def bytes_per_second(self) -> float:
        return self.read / self.milliseconds * 1e3


def random_bank(layout: ExpertLayout, experts: int) -> ExpertBank:
    """The same random numbers in each: what is timed is where experts lie, not what they are. Raises MemoryError."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).mul_(size[-1] ** -0.5)

    hidden, intermediate = layout.hidden, layout.intermediate
    gate, up = (quantize(numbers(intermediate, hidden), layout.gate_up) for _ in range(2))
    down = quantize(numbers(hidden, intermediate), layout.down)
    sizes = (intermediate, intermediate, hidden)
    biases = ExpertBiases(*(numbers(size) for size in sizes)) if layout.bias else None
    bank = ExpertBank.allocate(layout, experts)
    bank.blocks.copy_(pack_expert(layout, gate, up, down, biases).expand_as(bank.blocks))
    return bank


class Bank:
    """All experts of a layer."""

    def __init__(self, shape: Shape, format: Format) -> None:
        self.shape, self.format, self.layout = shape, format, shape.layout(format)
        self.blocks = random_bank(self.layout, shape.experts).blocks

    def time(self, batch: int, threads: int, dtype: torch.dtype) -> Timing:
        """`batch` rows with random routes, other experts in each call, so that caches hold none of them."""
        shape = self.shape
        x = torch.zeros(batch, padded(shape.hidden), dtype=dtype)
        x[:, : shape.hidden] = torch.randn(batch, shape.hidden)
        weights, out = torch.full((batch, shape.top_k), 1 / shape.top_k), torch.zeros(batch, shape.hidden)
        number, layout = self.format.number, self.layout
        routes = random_routes(shape, batch)

        def calls(count: int) -> tuple[float, int]:
            """Seconds of so many calls, and the experts that they used."""
            seconds, used = 0.0, 0
            for _ in range(count):
                ids, distinct = next(routes)
                used += distinct
                start = time.perf_counter()
                _native.experts_packed(
                    x, ids, weights, self.blocks, shape.hidden, shape.intermediate,
                    number, number, False, False, 0.0, 0.0, out, threads,
                )  # fmt: skip
                seconds += time.perf_counter() - start
            return seconds, used

        calls(1)
        count = max(1, min(200, int(LEAST_SECONDS / max(calls(1)[0], 1e-6))))
        measured = [calls(count) for _ in range(REPEATS)]
        return Timing(
            format=self.format.name,
            batch=batch,
            threads=threads,
            milliseconds=statistics.median(seconds for seconds, _ in measured) / count * 1e3,
            read=round(statistics.median(used for _, used in measured) / count * layout.used_bytes),
        )


def random_routes(shape: Shape, batch: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Expert ids int32 [batch, top_k], no expert twice in a row, and how many different ones there are.

    Goes through all experts before one comes again, as far as a batch does not need it sooner.
    """
    generator = torch.Generator().manual_seed(0)
    queue = torch.empty(0, dtype=torch.int64)
    while True:
        if batch == 1:
            if len(queue) < shape.top_k:
                queue = torch.randperm(shape.experts, generator=generator)
            ids, queue = queue[: shape.top_k].view(1, -1), queue[shape.top_k :]
        else:
            ids = torch.rand(batch, shape.experts, generator=generator).topk(shape.top_k).indices
        yield ids.to(torch.int32).contiguous(), len(set(ids.flatten().tolist()))
