"""Times both lanes of missing experts with the kernels of a step: the link (`fetch`) and the CPU (mailbox and lane).

What is timed is a layer's share of a captured graph, other experts in every round. Each lane is measured alone, then
both at once: they read the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ftengine.experts import mailbox as mailboxes
from ftengine.experts.cycle import COUNTS, Cycle
from ftengine.experts.lane import Lane, off_cores
from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.kernels.triton.buffers import FetchList
from ftengine.kernels.triton.fetch import copy_blocks
from ftengine.kernels.triton.handshake import publish, stamp
from ftengine.kernels.triton.join import join

ROUNDS, REPLAYS, LEAST_REPLAYS = 12, 5, 2
REPLAYS_SECONDS = 0.2  # from which on LEAST_REPLAYS are enough: over 3 GB/s a replay takes 80 ms
ROUND_BYTES = 250 << 20  # read in all rounds of a replay, about; a replay then takes some 25 ms over a slow link
STAGING_BYTES = 256 << 20  # on the GPU
STAMPS = 4  # of a round: before the bell, after it, after the link's part, after the CPU's


@dataclass(frozen=True)
class Times:
    """Microseconds of a layer, medians. cpu: from the bell until the GPU has added the rows."""

    link: float
    cpu: float
    both: float


class LaneProbe:
    """Both lanes on banks that the engine uses too, with a mailbox and staging slots of its own. Close it.

    The GPU must be able to read the banks; up to 256 MB of its memory are used, or two experts'. On the device "cpu"
    the kernels run in Triton's interpreter.
    """

    def __init__(
        self, banks: Sequence[ExpertBank], threads: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.banks, self.device = banks, torch.device(device)
        self.block_bytes = max(bank.layout.block_bytes for bank in banks)
        self.most = min(max(2, min(max(COUNTS), STAGING_BYTES // self.block_bytes)), *(bank.experts for bank in banks))
        self.counts = tuple(count for count in COUNTS if count <= self.most)
        hidden = banks[0].layout.hidden
        self.pool = SlotPool(dict(enumerate(banks)), 0, self.most, self.most, self.device).tensors
        self.mailbox = mailboxes.allocate(1, self.most, hidden, dtype, self.device)
        self.mailbox.rows.copy_(torch.randn(1, hidden))
        self.out = torch.zeros(1, hidden, device=self.device)
        self.times = torch.zeros(ROUNDS * STAMPS, dtype=torch.int64, device=self.device)
        self.wanted = torch.zeros(ROUNDS, 2, self.most, dtype=torch.int32, device=self.device)  # link's and CPU's
        self.weights = torch.full((1, self.most), 1 / self.most, device=self.device)
        self.slots = torch.arange(self.most, dtype=torch.int32, device=self.device)
        self.cycle = Cycle(banks)
        self.lane = Lane(banks, self.mailbox, threads)
        self.spent = 0.0  # seconds that all measurements took, without the compiling of kernels
        self._idle: tuple[Times, float] | None = None

    def close(self) -> None:
        self.lane.close()

    def handshake(self) -> float:
        """Microseconds from a bell to the joined reply where the CPU has nothing to compute."""
        return self._unladen()[0].both

    def link(self, experts: int) -> float:
        """Microseconds of the link alone."""
        return self._measure(experts, None)[0].link

    def cpu(self, experts: int) -> float:
        """Microseconds of the CPU alone."""
        return self._measure(0, experts)[0].both

    def both(self, link: int, cpu: int) -> Times:
        """So many experts a lane at the same time."""
        times, served = self._measure(link, cpu)
        idle, nothing = self._unladen()
        return Times(times.link, served + max(0.0, idle.both - nothing), times.both)

    def _unladen(self) -> tuple[Times, float]:
        if self._idle is None:
            self._idle = self._measure(0, 0)
        return self._idle

    def _measure(self, link: int, cpu: int | None) -> tuple[Times, float]:
        """Times a round, and what the lane itself says of a request. cpu None: nobody rings."""
        rounds = self._rounds_of(link + (cpu or 0))
        count = torch.full((1,), link, dtype=torch.int32, device=self.device)
        self._choose(rounds, link, cpu or 0)
        run = self._captured(lambda: self._queue(rounds, count, link, cpu is not None))
        found, before, took = [], self.lane.counts(), 0.0
        for replay in range(1 + (REPLAYS if rounds > 1 else LEAST_REPLAYS)):
            if replay > LEAST_REPLAYS and took > REPLAYS_SECONDS:
                break
            self._choose(rounds, link, cpu or 0)
            with off_cores(self.lane.threads):
                self.lane.wake()
                took += self._seconds(run)
            found.append(self.times[: rounds * STAMPS].view(rounds, STAMPS).cpu())
            if len(found) == 1:
                before = self.lane.counts()  # the first replay only warms the threads up
        self.spent += took * (1 + 1 / len(found))  # before it was captured, the work was done once
        error = self.lane.error()
        if error is not None:
            raise RuntimeError(error)
        table = torch.cat(found[1:]).double()
        link_us, both_us = ((table[:, i] - table[:, j]).median().item() / 1e3 for i, j in ((2, 1), (3, 0)))
        after = self.lane.counts()
        served = (after.seconds - before.seconds) / max(1, after.requests - before.requests) * 1e6
        return Times(link_us, both_us, both_us), served

    def _seconds(self, run: Callable[[], None]) -> float:
        """Of a replay. None in the interpreter: it is as slow on any machine."""
        begun = time.perf_counter()
        run()
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def _rounds_of(self, experts: int) -> int:
        most = ROUNDS if self.device.type == "cuda" else 2
        return max(1, min(most, ROUND_BYTES // max(1, experts * self.block_bytes)))

    def _queue(self, rounds: int, count: torch.Tensor, link: int, rings: bool) -> None:
        for number in range(rounds):
            layer = number % len(self.banks)
            to_link, to_cpu = self.wanted[number]
            self._stamp(STAMPS * number)
            if rings:
                publish(self.pool, self.mailbox, layer, to_cpu.view(1, -1), self.weights)
            self._stamp(STAMPS * number + 1)
            if link:
                copy_blocks(self.pool, self.banks[layer], FetchList(count, to_link, self.slots))
            self._stamp(STAMPS * number + 2)
            if rings:
                join(self.pool, layer, self.mailbox, self.out)
            self._stamp(STAMPS * number + 3)

    def _stamp(self, place: int) -> None:
        if self.device.type == "cuda":
            stamp(self.times, place)
        else:
            self.times[place] = time.perf_counter_ns()

    def _choose(self, rounds: int, link: int, cpu: int) -> None:
        """Other experts for every round; -1 where the CPU has none."""
        chosen = torch.full((ROUNDS, 2, self.most), -1, dtype=torch.int32)
        for number in range(rounds):
            taken = self.cycle.take(number % len(self.banks), link + cpu)
            chosen[number, 0, :link], chosen[number, 1, :cpu] = taken[:link], taken[link:]
        self.wanted.copy_(chosen)

    def _captured(self, body: Callable[[], None]) -> Callable[[], None]:
        if self.device.type != "cuda":
            return body
        self.lane.wake()
        body()  # kernels are compiled and loaded before the capture
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        replay: Callable[[], None] = graph.replay
        return replay
