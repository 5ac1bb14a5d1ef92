"""What the split of missing experts between link and CPU gives while another program loads the machine: fixed shares,
the costs measured at the start, and the split that follows the costs.

    python -m ftengine.bench.gpu_split [--model FOLDER --slots-percent 25 --load 0 2 8 --seconds 1.0 --follow 7]

Decodes at batch 1 (or --batch), at temperature 1; without a model, random weights in the shape of Qwen3.6-35B-A3B,
whose routing has no locality. A load is so many processes that read memory, each a core's worth. For each: tok/s of
every split, then how the following split settles after the load begins and after it ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ftengine.bench.gpu_model import CONTEXT, PAGE_SIZE, Run
from ftengine.bench.shapes import QWEN36
from ftengine.bench.synthetic import synthetic_model
from ftengine.cache.tensors import allocate_cache
from ftengine.errors import FtError
from ftengine.experts.online import OnlineSplit
from ftengine.experts.pinned import Refused, pin
from ftengine.experts.profile import lane_profile
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import LaneCosts
from ftengine.formats.format import BF16, NVFP4
from ftengine.kernels.triton.tuning import use_cache
from ftengine.memory.folders import cache_folder
from ftengine.models.base import ModelOptions, load
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.setup import GpuSetup
from ftengine.weights.checkpoint import Checkpoint

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WINDOW = 0.25  # seconds of a point of the time line
WARM = 48  # steps before something is measured: the cache settles
SETTLED = 0.05  # of the best fixed split's rate
TOKENS_LEFT = 1024  # of the context, kept free

# Reads 256 MiB again and again: more than a core's share of any cache.
READER = "import numpy as n\na = n.ones(1 << 25)\nwhile True: a.sum()"


@dataclass(frozen=True)
class Point:
    at: float  # seconds
    rate: float  # tok/s


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
        if len(self.run.sequences[0].tokens) + count > CONTEXT // self.batch - TOKENS_LEFT // self.batch:
            self._begin()
        return self.run.decode(count)

    def rate(self, seconds: float) -> float:
        """tok/s, the median of windows."""
        return statistics.median(point.rate for point in self.line(seconds))

    def line(self, seconds: float, start: float | None = None) -> list[Point]:
        """tok/s of WINDOW after WINDOW, for so long."""
        begin = time.perf_counter()
        start, points = begin if start is None else start, []
        while time.perf_counter() - begin < seconds:
            at, steps = time.perf_counter(), 0
            while time.perf_counter() - at < WINDOW:
                self.steps(4)
                steps += 4
            now = time.perf_counter()
            points.append(Point(now - start, self.batch * steps / (now - at)))
        return points


def main() -> None:
    options = _options()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="    %(message)s")
    began = time.perf_counter()
    use_cache(cache_folder())
    decoding, costs = _prepared(options)
    print(f"ready after {time.perf_counter() - began:.1f} s; {costs}", flush=True)
    decoding.steps(WARM)
    for load_ in options.load:
        _loaded(decoding, costs, load_, options)
    decoding.model.close()
    print(f"{time.perf_counter() - began:.0f} s in all")


def _loaded(decoding: Decoding, costs: LaneCosts, readers: int, options: argparse.Namespace) -> None:
    """Fixed splits under the load; then the following one before, under and after it."""
    fixed: dict[str, float] = {}
    with _reading(readers):
        for share in SHARES:
            decoding.model.experts.split = None
            decoding.pool.set_trials(0)
            decoding.pool.set_background(1.0)
            decoding.pool.set_cpu_share(share)
            decoding.steps(WARM)
            fixed[f"CPU {share:.0%}"] = decoding.rate(options.seconds)
        decoding.pool.set_cpu_share(None)
        decoding.pool.set_costs(costs)
        decoding.steps(WARM)
        fixed["as measured"] = decoding.rate(options.seconds)
    best = max(fixed[f"CPU {share:.0%}"] for share in SHARES)
    table = ", ".join(f"{name} {rate:.1f}" for name, rate in fixed.items())
    print(f"\n{readers} readers: tok/s with {table}; best fixed {best:.1f}", flush=True)
    split = follow(decoding, costs)
    decoding.line(options.follow / 2)
    if not readers:
        _settling("following", decoding.line(options.follow / 2), best, split)
        return
    with _reading(readers):
        _settling("load begins", decoding.line(options.follow), best, split)
    idle = decoding.line(options.follow)
    _settling("load ends", idle, statistics.median(point.rate for point in idle[-8:]), split)


def follow(decoding: Decoding, costs: LaneCosts) -> OnlineSplit:
    """From the costs that were measured at the start."""
    experts = decoding.model.experts
    assert experts.lane is not None
    decoding.pool.set_cpu_share(None)
    decoding.pool.set_background(1.0)
    decoding.pool.set_costs(costs)
    experts.split = OnlineSplit(decoding.pool, experts.lane)
    return experts.split


def _settling(name: str, points: list[Point], best: float, split: OnlineSplit) -> None:
    """The last point of those further than SETTLED below; a single one is the machine's, not the split's."""
    rates = [point.rate for point in points]
    smooth = [statistics.median(rates[max(0, i - 1) : i + 2]) for i in range(len(rates))]
    slow = [point.at for point, rate in zip(points, smooth, strict=True) if rate < (1 - SETTLED) * best]
    settled = 0.0 if not slow else slow[-1] - points[0].at + WINDOW
    end = statistics.median(rates[-8:])
    line = " ".join(f"{rate:.0f}" for rate in rates[:: max(1, len(rates) // 24)])
    costs = split.learner.costs
    print(
        f"{name}: {end:.1f} tok/s at the end, {end / best - 1:+.1%} of {best:.1f}; within {SETTLED:.0%} after "
        f"{settled:.1f} s; {split.moves.count} moves; link {costs.a_link:.0f} + {costs.b_link:.0f} n, CPU "
        f"{costs.a_cpu:.0f} + {costs.b_cpu:.0f} n us, {costs.late:.1%} late by {costs.late_us:.0f} us; "
        f"background {split.pool.background:.2f}\n    {line}",
        flush=True,
    )


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


def _prepared(options: argparse.Namespace) -> tuple[Decoding, LaneCosts]:
    if options.model is not None:
        model = load(Checkpoint.open(options.model), ModelOptions(dtype="bfloat16", device="cuda"))
    else:
        model = synthetic_model(options.layers, "bfloat16", NVFP4, QWEN36, dense=BF16, device="cuda")
    assert isinstance(model, GpuDecoder), "a model that runs on a GPU"
    assert model.banks, "it has no routed experts"
    for bank in model.banks.values():
        pinned = pin(bank.blocks)
        if isinstance(pinned, Refused):
            raise SystemExit(pinned.reason)
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
        )
    )
    return Decoding(model, options.batch), profile.costs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=os.environ.get("MODEL"), help="a folder of weights; $MODEL")
    parser.add_argument("--layers", type=int, default=40, help="of random weights")
    parser.add_argument("--slots-percent", type=int, default=25)
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() - 1), help="of the CPU's lane")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--load", type=int, nargs="*", default=[0, 4], help="processes that read memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each fixed split")
    parser.add_argument("--follow", type=float, default=8.0, help="of the following split after a change")
    parser.add_argument("--verbose", action="store_true", help="what the split logs")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except FtError as error:
        sys.exit(f"Error: {error}\nTry:   {error.next_step or 'ft doctor'}")
