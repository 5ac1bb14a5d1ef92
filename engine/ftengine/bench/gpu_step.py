"""How fast the engine decodes with several numbers of slots, and what its steps are made of.

    python -m ftengine.bench.gpu_step [--model FOLDER --slots-percent 100 25 10 0 --batch 1 4 --policy aged lru]

The weights are read once. Then, for each number of slots: scheduler, prompt cache, graphs and sampling as a server has
them, at temperature 1; steps are timed first and looked at by torch's profiler afterwards, which makes them slower.
Where all experts have a slot the strategy is `resident`, with none it is `cpu`, else --strategy. Without a model:
random weights in the shape of Qwen3.6-35B-A3B, whose routing has no locality. Nothing goes over HTTP.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_step", __doc__)

import torch

from ftengine.bench.gpu_model import loaded
from ftengine.bench.step_parts import StepParts, divide, seen
from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache
from ftengine.core import Request, SamplingParams
from ftengine.errors import ConfigError, FtError
from ftengine.experts.counts import LayerCounts
from ftengine.experts.profile import lane_profile
from ftengine.experts.split import LaneCosts
from ftengine.kernels.triton.tuning import use_cache
from ftengine.memory.folders import cache_folder, use_kernel_cache
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.setup import GpuSetup
from ftengine.models.gpu.strategy import Strategy
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from ftengine.scheduler.lanes import pin_banks
from ftengine.wire import Failed, Output

PAGE_SIZE, PROMPT = 16, 64
PROFILED = 24  # steps
SPARE = 4  # pages and states of a sequence beside its own: none waits until another one ends


@dataclass(frozen=True)
class Case:
    """strategy: of what has no slot. slots: experts."""

    strategy: Strategy
    slots: int
    policy: str

    def __str__(self) -> str:
        return f"{self.slots} slots, {self.strategy}" + (f", {self.policy}" if self.slots else "")


@dataclass(frozen=True)
class Timed:
    """Of so many steps: tokens of all sequences, seconds, and what the cache counted meanwhile."""

    steps: int
    tokens: int
    seconds: float
    before: LayerCounts | None
    after: LayerCounts | None

    def __str__(self) -> str:
        said = f"{self.tokens / self.seconds:.1f} tok/s, {self.seconds / self.steps * 1e3:.3f} ms a step"
        if self.before is None or self.after is None or self.after.steps == self.before.steps:
            return said
        each = {
            name: (getattr(self.after, name) - getattr(self.before, name)) / self.steps
            for name in ("hits", "foretold", "misses", "fetched", "cpu_experts", "admitted", "prefetched")
        }
        return (
            f"{said}; experts a step: {each['hits'] - each['foretold']:.1f} in slots, {each['misses']:.1f} missing "
            f"({each['fetched']:.1f} fetched, {each['cpu_experts']:.1f} on the CPU), "
            f"{each['prefetched']:.1f} prefetched ({each['foretold']:.1f} used), {each['admitted']:.1f} admitted"
        )


class Decoding:
    """So many sequences that decode together, through an engine of their own. context: tokens of each."""

    def __init__(self, model: GpuDecoder, batch: int, context: int) -> None:
        self.model = model
        where = "interpret" if model.device.type == "cpu" else model.device.type
        pages, slots = (-(-context // PAGE_SIZE) + SPARE) * batch, SPARE * batch
        tensors = allocate_cache(model.cache_layout, pages, PAGE_SIZE, slots, where)
        model.warm_up(tensors, lambda stage, done: None, PROMPT)
        cache = SequenceCache(tensors, pages, slots)
        limits = Limits(context, batch, model.vocab_size, ())
        self.engine = Engine(model, cache, limits, PrefillBudget(PROMPT, PAGE_SIZE, seconds=60.0, first=PROMPT))
        self.engine.warm_up()
        self._requests = list(_requests(batch, model.vocab_size, context))

    def start(self) -> None:
        """Computes the prompts and the first tokens of all sequences."""
        waiting = {request.id for request in self._requests}
        for request in self._requests:
            assert not self.engine.submit(request)
        while waiting:
            waiting -= {event.id for event in self._step() if event.tokens}

    def steps(self, count: int) -> Timed:
        """Raises RuntimeError where a sequence ends: the context is too short."""
        before, start, tokens = self._counts(), time.perf_counter(), 0
        for _ in range(count):
            tokens += sum(len(event.tokens) for event in self._step())
        return Timed(count, tokens, time.perf_counter() - start, before, self._counts())

    def _step(self) -> list[Output]:
        found = [*self.engine.admit(), *self.engine.step()]
        events = [event for event in found if isinstance(event, Output)]
        if failed := [event for event in found if isinstance(event, Failed)]:
            raise RuntimeError(failed[0].message)
        if any(event.finish is not None for event in events):
            raise RuntimeError("a sequence ended while its steps were timed")
        return events

    def _counts(self) -> LayerCounts | None:
        found = self.model.experts.stats()
        return None if found is None else found.total


def _requests(batch: int, vocabulary: int, context: int) -> Iterator[Request]:
    generator = torch.Generator().manual_seed(batch)
    for number in range(batch):
        prompt = torch.randint(0, vocabulary, (PROMPT,), generator=generator).tolist()
        params = SamplingParams(context - PROMPT, temperature=1.0, seed=number, ignore_eos=True)
        yield Request(str(number), prompt, params)


def cases(options: argparse.Namespace, total: int) -> list[Case]:
    """total: experts of the model. The policies only where there is something to choose."""
    made = []
    for percent in options.slots_percent:
        slots = total * percent // 100
        strategy: Strategy = "resident" if slots >= total else options.strategy if slots else "cpu"
        chosen = options.policy if 0 < slots < total else options.policy[:1]
        made += [Case(strategy, slots, policy) for policy in chosen]
    return made


def _prepare(model: GpuDecoder, case: Case, batch: int, context: int, costs: LaneCosts | None, threads: int) -> None:
    model.prepare(
        GpuSetup(
            case.strategy,
            max_running=batch,
            context=context,
            page_size=PAGE_SIZE,
            slots=case.slots,
            staging=min(128, 2 * model.banks[0].experts),
            threads=threads,
            costs=costs,
            policy=case.policy,
            rest="where faster",
        )
    )


def measure(model: GpuDecoder, options: argparse.Namespace) -> Iterator[tuple[Case, int, Timed, StepParts | None]]:
    """With each number of sequences. Without a GPU there is nothing that a profiler could see."""
    costs = None
    if model.device.type == "cuda":
        banks = [model.banks[layer] for layer in sorted(model.banks)]
        profile, _ = lane_profile(None, banks, options.threads, model.weights.dtype, model.device)
        costs = profile.costs
    total = sum(bank.experts for bank in model.banks.values())
    context = PROMPT + options.warm + options.steps + PROFILED + 16
    for case in cases(options, total):
        for batch in options.batch:
            _prepare(model, case, batch, context, costs, options.threads)
            run = Decoding(model, batch, context)
            run.start()
            run.steps(options.warm)
            timed = run.steps(options.steps)
            parts = None
            if model.device.type == "cuda":
                parts = divide(seen(lambda run=run: run.steps(PROFILED)), PROFILED)  # type: ignore[misc]
            yield case, batch, timed, parts


def main(arguments: list[str] | None = None) -> None:
    options = parse("gpu_step", __doc__, arguments)
    use_kernel_cache()
    use_cache(cache_folder())
    lacks = "there are no slots to compare"
    model = loaded(options.model, options.layers, options.dtype, options.device, lacks=lacks)
    with closing(pin_banks(model.banks, model.device)) as pinned, closing(model):
        if not pinned.outcome.value:
            raise ConfigError(pinned.outcome.reason, "ulimit -l unlimited")
        for case, batch, timed, parts in measure(model, options):
            print(f"{case}, {batch} sequence{'' if batch == 1 else 's'}: {timed}", flush=True)
            if parts is not None:
                print("\n".join(parts.lines()), flush=True)


if __name__ == "__main__":
    try:
        main()
    except FtError as error:
        sys.exit(f"Error: {error}\nTry:   {error.next_step or 'ft doctor'}")
