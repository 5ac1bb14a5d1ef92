"""What is learnt of the real CPU lane while other programs read memory, against the means of its own log
(test_lane_log.py holds that against a clock outside): idle, loaded, idle.

Run it with `pytest -m slow tests/experts/test_online_lane.py`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native")

from ftengine.experts import mailbox as mailboxes
from ftengine.experts.lane import Lane
from ftengine.experts.layer_times import LayerTimes
from ftengine.experts.learner import CostLearner
from ftengine.experts.pool import ExpertBank
from ftengine.experts.split import LaneCosts
from ftengine.formats.format import NVFP4, ExpertLayout

TOP_K, HIDDEN, INTERMEDIATE, EXPERTS = 8, 1024, 512, 64
READER = "import numpy as n\na = n.ones(1 << 24)\nwhile True: a.sum()"


class Asking:
    def __init__(self, lane: Lane, learner: CostLearner) -> None:
        self.lane, self.learner = lane, learner
        self.generator = torch.Generator().manual_seed(0)
        self.known = 0

    def ask(self, requests: int) -> dict[int, float]:
        """Microseconds of a request by its experts, as the lane logs them; the means of all."""
        begin = time.perf_counter()
        for number in range(requests):
            ids = torch.full((1, TOP_K), -1, dtype=torch.int32)
            count = 1 + number % TOP_K
            ids[0, :count] = torch.randperm(EXPERTS, generator=self.generator)[:count]
            self.lane.request(0, torch.randn(1, HIDDEN), ids, torch.full((1, TOP_K), 0.1))
        log = self.lane.log()
        log = log[log[:, 0] > self.known]
        self.known = int(log[-1, 0])
        counts, served, nothing = log[:, 1], log[:, 3] / 1e3, numpy.zeros(len(log))
        ones, none = numpy.ones_like(counts), numpy.zeros_like(counts)
        # The GPU waited for each: `done` is the CPU's time.
        times = LayerTimes(ones, counts, none, log[:, 2], nothing, nothing, served, served, nothing, none)
        self.learner.add(times, time.perf_counter() - begin)
        return {count: float(served[counts == count].mean()) for count in range(1, TOP_K + 1)}


@contextmanager
def reading(count: int) -> Iterator[None]:
    readers = [subprocess.Popen([sys.executable, "-c", READER]) for _ in range(count)]
    try:
        time.sleep(1.0)
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


@pytest.mark.slow
def test_costs_follow_the_real_lane() -> None:
    layout = ExpertLayout(HIDDEN, INTERMEDIATE, NVFP4, NVFP4)
    bank = ExpertBank.allocate(layout, EXPERTS)
    bank.blocks.fill_(17)
    box = mailboxes.allocate(1, TOP_K, HIDDEN, torch.float32, "cpu")
    learner = CostLearner(LaneCosts(3.0, 37.0, 7.0, 400.0), TOP_K)
    with Lane([bank], box, 1) as lane:
        asking = Asking(lane, learner)
        for readers in (0, 4, 0):
            with reading(readers):
                for _ in range(4):
                    means = asking.ask(600)
            costs = learner.costs
            learnt = [costs.cpu(count) + costs.late * costs.late_us for count in means]
            # Of all together: beside a load a few requests of one kind are several times as long as the others.
            assert sum(learnt) == pytest.approx(sum(means.values()), rel=0.3)
