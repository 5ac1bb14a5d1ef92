"""What the split of missing experts between link and CPU gives while another program loads the machine: fixed shares,
the costs measured at the start, and the split that follows the costs.

    python -m ftengine.bench.gpu_split [--model FOLDER --slots-percent 25 --load 0 4 --follow 10 --pairs 8]

Decodes at batch 1 (or --batch), at temperature 1; without a model, random weights in the shape of Qwen3.6-35B-A3B,
whose routing has no locality. A load is so many processes that read memory, each a core's worth. For each: tok/s of
every fixed split, once; how the following one settles after the load begins, and after it ends; then the best fixed
split and the following one in turns (paired.py), which is what the following one is judged by.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_split", __doc__)

from ftengine.bench.gpu_model import CONTEXT, PAGE_SIZE, Run, loaded
from ftengine.bench.paired import Paired, Point, Stopwatch, Window, best_of, in_turns, settled, typical
from ftengine.cache.tensors import allocate_cache
from ftengine.errors import ConfigError, FtError
from ftengine.experts.online import OnlineSplit
from ftengine.experts.profile import lane_profile
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import LaneCosts
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.tuning import use_cache
from ftengine.memory.folders import cache_folder
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.experts import GpuExperts
from ftengine.models.gpu.setup import GpuSetup
from ftengine.scheduler.lanes import pin_banks

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WINDOW = 0.25  # seconds of a point of the time line
PAIRED_WINDOW = 0.7  # seconds of a window of a pair
WARM = 48  # steps before something is measured: the cache settles
SWITCHED = at.RECORDED.value  # steps after a change of splits that nobody looks at: the record has no others left
RETURN = 2.0  # seconds of the following split without a load, before one begins
SETTLED = 0.05  # of the best fixed split's rate
TOKENS_LEFT = 1024  # of the context, kept free
MOST_STEPS = 400  # a second, that pairs are expected to take of one context

# Reads 256 MiB again and again: more than a core's share of any cache.
READER = "import numpy as n\na = n.ones(1 << 25)\nwhile True: a.sum()"


@dataclass(frozen=True)
class Fixed:
    """A split that stays as it is; by the costs where `share`, of the CPU, is None."""

    share: float | None
    costs: LaneCosts

    def __str__(self) -> str:
        return "as measured" if self.share is None else f"CPU {self.share:.0%}"

    def use(self, pool: SlotPool) -> None:
        pool.set_trials(0)
        pool.set_background(1.0)
        pool.costs = self.costs
        pool.set_cpu_share(self.share)


class Following:
    """The split that follows, from the costs that were measured at the start. steps: decodes so many."""

    def __init__(
        self,
        experts: GpuExperts,
        costs: LaneCosts,
        steps: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert experts.pool is not None, "a model with routed experts"
        assert experts.lane is not None, "the hybrid strategy"
        self._experts, self._steps = experts, steps
        self.pool = experts.pool
        self._clock = Stopwatch(clock)
        Fixed(None, costs).use(self.pool)
        self.split = experts.split = OnlineSplit(self.pool, experts.lane, self._clock)

    @contextmanager
    def set_aside(self, fixed: Fixed) -> Iterator[None]:
        """Inside, a fixed split has the pool. This one learns nothing of it, nor does time pass for it, and goes on
        with the tables that it had."""
        pool = self.pool
        table, control = (tensor.to("cpu", copy=True) for tensor in (pool.tensors.split, pool.tensors.control))
        costs = pool.costs
        self._experts.split = None
        self._clock.stop()
        try:
            fixed.use(pool)
            self._steps(SWITCHED)
            yield
        finally:
            Fixed(None, costs).use(pool)
            pool.set_split(table.numpy())
            pool.set_trials(int(control[at.TRIES.value]))
            pool.set_background(float(control[at.BUDGET.value]))
            self._steps(SWITCHED)
            self._clock.go_on()
            self._experts.split = self.split

    def __str__(self) -> str:
        costs = self.split.learner.costs
        return (
            f"{self.split.moves.count} moves; link {costs.a_link:.0f} + {costs.b_link:.0f} n, CPU {costs.a_cpu:.0f} + "
            f"{costs.b_cpu:.0f} n us, {costs.late:.1%} late by {costs.late_us:.0f} us; "
            f"background {self.pool.background:.2f}"
        )


class Decoding:
    """One model that decodes on and on; begins anew where the context ends."""

    def __init__(self, model: GpuDecoder, batch: int) -> None:
        self.model, self.batch = model, batch
        self.cache = allocate_cache(model.cache_layout, CONTEXT // PAGE_SIZE, PAGE_SIZE, batch, "cuda")
        model.warm_up(self.cache, lambda stage, done: None)
        self._begin()

    @property
    def pool(self) -> SlotPool:
        pool = self.model.experts.pool
        assert pool is not None
        return pool

    def _begin(self) -> None:
        self.run = Run(self.model, self.cache, self.batch, sampled=True)
        self.run.prefill(64, 64)

    def steps(self, count: int) -> float:
        """Seconds."""
        self.make_room(count)
        return self.run.decode(count)

    def make_room(self, count: int) -> None:
        """For so many steps in one context."""
        if len(self.run.sequences[0].tokens) + count > (CONTEXT - TOKENS_LEFT) // self.batch:
            self._begin()
            self.run.decode(WARM)

    def window(self, seconds: float) -> Window:
        """Of what decodes already."""
        before, spent, steps = self.pool.stats().total, 0.0, 0
        while spent < seconds:
            spent += self.steps(4)
            steps += 4
        after = self.pool.stats().total
        misses = (after.misses - before.misses) / max(1, after.steps - before.steps)
        return Window(self.batch * steps / spent, misses)

    def line(self, seconds: float) -> list[Point]:
        """tok/s of WINDOW after WINDOW, for so long."""
        begin, points = time.perf_counter(), []
        while time.perf_counter() - begin < seconds:
            spent, steps = 0.0, 0
            while spent < WINDOW:
                spent += self.steps(4)
                steps += 4
            points.append(Point(time.perf_counter() - begin, self.batch * steps / spent))
        return points


class Experiment:
    """A model that decodes under loads that come and go."""

    def __init__(self, decoding: Decoding, costs: LaneCosts, options: argparse.Namespace) -> None:
        self.decoding, self.options, self.costs = decoding, options, costs
        decoding.steps(WARM)
        self.following = Following(decoding.model.experts, costs, decoding.steps)
        self.idle = self.best_fixed(0)

    def under(self, readers: int) -> None:
        if not readers:
            self.judge("following", self.idle)
            return
        with _reading(readers):
            best = self.best_fixed(readers)
        self.decoding.line(RETURN)
        with _reading(readers):
            self.judge("load begins", best)
        self.judge("load ends", self.idle)

    def best_fixed(self, readers: int) -> Fixed:
        """Of those that are nearly the best, any: how fast it is, pairs say."""

        def rate(fixed: Fixed) -> float:
            return self._fixed(fixed, self.options.seconds).rate

        measured = Fixed(None, self.costs)
        best, rates = best_of([Fixed(share, self.costs) for share in SHARES], rate)
        table = ", ".join(f"{fixed} {rate:.1f}" for fixed, rate in {**rates, measured: rate(measured)}.items())
        print(f"\n{readers} readers, one window each, tok/s: {table}; in pairs: {best}", flush=True)
        return best

    def judge(self, name: str, fixed: Fixed) -> None:
        """The machine has just changed."""
        points = self.decoding.line(self.options.follow)
        seconds = self.options.pairs * 2 * PAIRED_WINDOW
        self.decoding.make_room(int(MOST_STEPS * seconds))  # a new beginning in between would be one arm's
        paired = in_turns(
            self.options.pairs,
            lambda: self._fixed(fixed, PAIRED_WINDOW),
            lambda: self.decoding.window(PAIRED_WINDOW),
        )
        base = typical(paired.first).rate
        after = settled(points, (1 - SETTLED) * base)
        when = f"not in {self.options.follow:.0f} s" if after is None else f"after {after:.1f} s"
        rates = [point.rate for point in points]
        print(f"{name}: within {SETTLED:.0%} of {base:.1f} tok/s {when}; {self.following}")
        print("    " + " ".join(f"{rate:.0f}" for rate in rates[:: max(1, len(rates) // 24)]))
        print(f"    {report(paired, str(fixed))}", flush=True)

    def _fixed(self, fixed: Fixed, seconds: float) -> Window:
        with self.following.set_aside(fixed):
            return self.decoding.window(seconds)


def report(paired: Paired, fixed: str) -> str:
    """One line: the ratio, and of each arm its speed and what it had to do."""
    low, middle, high = paired.quartiles
    said = [f"following / {fixed}: {middle:.3f}, quartiles {low:.3f} to {high:.3f} of {len(paired.first)} pairs"]
    for name, windows in ((fixed, paired.first), ("following", paired.second)):
        one = typical(windows)
        said.append(f"{name} {one.rate:.1f} tok/s with {one.misses:.2f} misses a layer")
    return "; ".join(said)


def main() -> None:
    options = parse("gpu_split", __doc__)
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="    %(message)s")
    began = time.perf_counter()
    use_cache(cache_folder())
    model = loaded(options.model, options.layers, lacks="there is nothing to split")
    with closing(pin_banks(model.banks, model.device)) as pinned, closing(model):
        if not pinned.outcome.value:
            raise ConfigError(f"there is nothing to split: {pinned.outcome.reason}", "ft doctor")
        costs = _prepare(model, options)
        decoding = Decoding(model, options.batch)
        ready = time.perf_counter()
        print(f"ready after {ready - began:.1f} s; {costs}", flush=True)
        experiment = Experiment(decoding, costs, options)
        for readers in options.load:
            experiment.under(readers)
        print(f"{time.perf_counter() - ready:.0f} s, and {ready - began:.0f} s before")


@contextmanager
def _reading(processes: int) -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    readers = [subprocess.Popen([sys.executable, "-c", READER], env=environment) for _ in range(processes)]
    try:
        if readers:
            time.sleep(0.6)  # they import and fill their memory
        yield
    finally:
        for reader in readers:
            reader.kill()
        for reader in readers:
            reader.wait()


def _prepare(model: GpuDecoder, options: argparse.Namespace) -> LaneCosts:
    banks = [model.banks[layer] for layer in sorted(model.banks)]
    profile, _ = lane_profile(None, banks, options.threads, model.weights.dtype, model.device)
    assert profile.costs is not None
    total = sum(bank.experts for bank in banks)
    model.prepare(
        GpuSetup(
            "hybrid",
            max_running=options.batch,
            context=CONTEXT,
            page_size=PAGE_SIZE,
            slots=total * options.slots_percent // 100,
            staging=128,
            threads=options.threads,
            costs=profile.costs,
            prefetch=options.prefetch,
        )
    )
    return profile.costs


if __name__ == "__main__":
    try:
        main()
    except FtError as error:
        sys.exit(f"Error: {error}\nTry:   {error.next_step or 'ft doctor'}")
