"""Times experts on the CPU where no GPU hands them over: the call that a model's step makes. Needs no Triton."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ftengine import _native
from ftengine.experts.cycle import COUNTS, Cycle
from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import padded

CALLS, LEAST_CALLS, WARM = 60, 5, 3
CALL_BYTES = 1 << 30  # read in all calls of a measurement, about


class CpuProbe:
    """`LaneProbe`'s part for the CPU. Banks as the engine has them, all of one shape."""

    def __init__(self, banks: Sequence[ExpertBank], threads: int, dtype: torch.dtype) -> None:
        self.banks, self.threads = banks, threads
        most = min(bank.experts for bank in banks)
        self.counts = tuple(count for count in COUNTS if count <= most)
        hidden = banks[0].layout.hidden
        self._rows = torch.zeros(1, padded(hidden), dtype=dtype)
        self._rows[:, :hidden] = torch.randn(1, hidden)
        self._out = torch.zeros(1, hidden)
        self._cycle = Cycle(banks)

    def handshake(self) -> float:
        """Nothing is handed over."""
        return 0.0

    def cpu(self, experts: int) -> float:
        """Microseconds of a layer with so many, one row: the lower quartile. Others only ever take time away."""
        size = experts * max(bank.layout.block_bytes for bank in self.banks)
        calls = max(LEAST_CALLS, min(CALLS, CALL_BYTES // max(1, size)))
        times = [self._call(number % len(self.banks), experts) for number in range(WARM + calls)]
        return statistics.quantiles(times[WARM:], n=4)[0] * 1e6

    def _call(self, number: int, experts: int) -> float:
        """Seconds."""
        bank, layout = self.banks[number], self.banks[number].layout
        ids = self._cycle.take(number, experts).int().view(1, -1)
        weights = torch.full((1, experts), 1 / experts)
        start = time.perf_counter()
        _native.experts_packed(
            self._rows, ids, weights, bank.blocks, layout.hidden, layout.intermediate,
            layout.gate_up.number, layout.down.number, layout.bias, False, 0.0, 0.0, self._out, self.threads,
        )  # fmt: skip
        return time.perf_counter() - start
