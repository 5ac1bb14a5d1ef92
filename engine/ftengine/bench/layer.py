"""Times one layer of routed experts against the bytes that it must read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ftengine import _native
from ftengine.formats.format import ExpertLayout, Format, padded
from ftengine.formats.pack import pack_expert
from ftengine.formats.quantize import quantize
from ftengine.weights.buffer import host_buffer

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


class Bank:
    """All experts of a layer, the same random numbers in each: what is timed is where they lie, not what they are."""

    def __init__(self, shape: Shape, format: Format) -> None:
        self.shape, self.format, self.layout = shape, format, shape.layout(format)
        generator = torch.Generator().manual_seed(0)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

        gate, up = (quantize(matrix(shape.intermediate, shape.hidden), format) for _ in range(2))
        block = pack_expert(self.layout, gate, up, quantize(matrix(shape.hidden, shape.intermediate), format))
        self.blocks = host_buffer(shape.bank_bytes(format)).view(shape.experts, -1)
        self.blocks.copy_(block.expand_as(self.blocks))

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
