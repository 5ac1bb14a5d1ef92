"""Times a whole model on the GPU without a scheduler, and says which kernels a decode step's time goes to.

    python -m ftengine.bench.gpu_model [--layers 40 --strategy hybrid --slots-percent 25 --batches 1 4 --prefill 512]

Random weights in the exact shape of Qwen3.6-35B-A3B: experts in NVFP4, the rest in BF16. Routing of random weights has
no locality, so hit rates are about the share of experts that have a slot.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_model", __doc__)

import torch

from ftengine.bench.shapes import QWEN36
from ftengine.bench.step_parts import divide, seen
from ftengine.bench.synthetic import synthetic_model
from ftengine.cache.tensors import allocate_cache
from ftengine.core import CacheTensors, Request, SamplingParams, Sequence
from ftengine.errors import ConfigError
from ftengine.experts.pinned import Refused, pin
from ftengine.experts.profile import lane_profile
from ftengine.experts.split import LaneCosts
from ftengine.formats.format import BF16, NVFP4
from ftengine.kernels.triton.tuning import tuning, use_cache
from ftengine.memory.folders import cache_folder
from ftengine.models.base import Model, ModelOptions, load
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.setup import GpuSetup
from ftengine.scheduler.batch import BatchBuilder, Work
from ftengine.weights.checkpoint import Checkpoint

PAGE_SIZE, CONTEXT = 16, 32768
COUNTED = ("hits", "foretold", "misses", "fetched", "cpu_experts", "admitted", "waited_ns")
PROFILED = 20  # steps


class Run:
    """Sequences of random tokens over one model and one cache. sampled: at temperature 1; greedy answers of random
    weights soon repeat themselves, and with them the experts that they need."""

    def __init__(self, model: GpuDecoder, cache: CacheTensors, sequences: int, *, sampled: bool = False) -> None:
        self.model, self.cache = model, cache
        self._choose = _drawn if sampled else _likeliest
        self.batches = BatchBuilder(PAGE_SIZE)
        pages = CONTEXT // PAGE_SIZE // sequences
        params = SamplingParams(max_tokens=1 << 30, temperature=0.0)
        self.sequences = [
            Sequence(
                Request(str(number), [], params),
                [],
                pages=list(range(number * pages, (number + 1) * pages)),
                state_slot=number,
            )
            for number in range(sequences)
        ]

    def prefill(self, tokens: int, chunk: int) -> float:
        """Seconds for so many new tokens of each sequence."""
        generator = torch.Generator().manual_seed(len(self.sequences) + tokens)
        for sequence in self.sequences:
            sequence.tokens += torch.randint(0, self.model.vocab_size, (tokens,), generator=generator).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for sequence in self.sequences:
            end = len(sequence.tokens)  # the last chunk adds the first token that was chosen
            while sequence.computed < end:
                self._step([Work(sequence, min(chunk, end - sequence.computed))])
        return time.perf_counter() - start

    def decode(self, steps: int) -> float:
        """Seconds for so many steps of all sequences together."""
        start = time.perf_counter()
        for _ in range(steps):
            self._step([Work(sequence, len(sequence.tokens) - sequence.computed) for sequence in self.sequences])
        return time.perf_counter() - start

    def _step(self, work: list[Work]) -> None:
        batch = self.batches.build(work)
        chosen = self.model.launch(batch, self.cache, self._choose).collect().tolist()
        for item in work:
            item.sequence.computed += item.tokens
        ended = [item.sequence for item in work if item.sequence.computed == len(item.sequence.tokens)]
        for sequence, token in zip(ended, chosen, strict=True):
            sequence.tokens.append(token)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def _drawn(logits: torch.Tensor) -> torch.Tensor:
    """The first of exponential clocks that run at the probabilities' rates."""
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)


def main() -> None:
    options = parse("gpu_model", __doc__)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    use_cache(cache_folder())
    start = time.perf_counter()
    config = {**QWEN36, "num_experts": options.experts}
    model = synthetic_model(options.layers, options.dtype, NVFP4, config, dense=BF16, device="cuda")
    assert isinstance(model, GpuDecoder)
    _say("loaded", start)
    costs = None if options.strategy == "resident" else _lanes(model, options.threads)
    start = time.perf_counter()
    total = options.layers * options.experts
    model.prepare(
        GpuSetup(
            options.strategy,
            max_running=max(options.batches),
            context=CONTEXT,
            page_size=PAGE_SIZE,
            slots=0 if options.strategy == "cpu" else total * options.slots_percent // 100,
            staging=options.staging,
            threads=options.threads,
            branches=not options.no_branches,
            costs=costs,
        )
    )
    _say("prepared", start)
    start = time.perf_counter()
    cache = allocate_cache(model.cache_layout, CONTEXT // PAGE_SIZE, PAGE_SIZE, max(options.batches), "cuda")
    model.warm_up(cache, lambda stage, done: None)
    _say("kernels compiled, graphs captured", start)
    if options.check:
        _check(model, cache, options.layers, options.dtype, config)
    for batch in options.batches:
        _decode(Run(model, cache, batch), batch, options.tokens)
    for length in options.prefill:
        _prefill(model, cache, length)
    model.close()


def loaded(
    folder: Path | None, layers: int, dtype: str = "bfloat16", device: str = "cuda", *, lacks: str
) -> GpuDecoder:
    """A model with routed experts; None: so many layers of random weights in the shape of Qwen3.6-35B-A3B.

    Raises ConfigError where there are none on the device: what is then lacking is a clause of the caller's.
    """
    if folder is not None:
        model = load(Checkpoint.open(folder), ModelOptions(dtype=dtype, device=device))
    else:
        model = synthetic_model(layers, dtype, NVFP4, QWEN36, dense=BF16, device=device)
    if not isinstance(model, GpuDecoder) or not model.banks:
        raise ConfigError(f"the model has no routed experts on a GPU: {lacks}", "ft doctor")
    return model


def _lanes(model: GpuDecoder, threads: int) -> LaneCosts | None:
    start = time.perf_counter()
    for bank in model.banks.values():
        pinned = pin(bank.blocks)
        if isinstance(pinned, Refused):
            raise SystemExit(pinned.reason)
    _say("pinned", start)
    start = time.perf_counter()
    banks = [model.banks[layer] for layer in sorted(model.banks)]
    profile, _ = lane_profile(None, banks, threads, model.weights.dtype, model.device)
    _say(f"lanes measured: handshake {profile.handshake_us} us, {profile.costs}", start)
    return profile.costs


def _check(model: GpuDecoder, cache: CacheTensors, layers: int, dtype: str, config: dict[str, Any]) -> None:
    """Logits of a short prompt and of a decode step, beside those of the CPU's decoder with the same weights."""
    reference = synthetic_model(layers, dtype, NVFP4, config, dense=BF16)
    host = allocate_cache(reference.cache_layout, CONTEXT // PAGE_SIZE, PAGE_SIZE, 1)
    found, expected = _two_steps(model, cache), _two_steps(reference, host)
    for step, ours, theirs in zip(("prefill", "decode"), found, expected, strict=True):
        error, same = (ours - theirs).abs(), bool(ours.argmax() == theirs.argmax())
        print(
            f"{step}: logits differ from the CPU's by {error.median():.2e} (median), {error.max():.2e} at the most; "
            f"their deviation is {theirs.std():.2f}; the likeliest token is {'the same' if same else 'another one'}"
        )


def _two_steps(model: Model, cache: CacheTensors) -> list[torch.Tensor]:
    """Last logits, [V], of nine tokens at once and of a tenth."""
    params = SamplingParams(max_tokens=16, temperature=0.0)
    tokens = [7919 * number % model.vocab_size for number in range(10)]
    sequence = Sequence(Request("check", [], params), tokens[:9], pages=[0], state_slot=0)
    batches, found = BatchBuilder(PAGE_SIZE), []
    for length in (9, 1):
        found.append(model.forward(batches.build([Work(sequence, length)]), cache)[-1].cpu())
        sequence.computed += length
        sequence.tokens.append(tokens[9])
    return found


def _decode(run: Run, batch: int, tokens: int) -> None:
    run.prefill(64, 64)
    run.decode(20)
    before = run.model.experts.stats()
    seconds = run.decode(tokens)
    print(f"\nbatch {batch}: {batch * tokens / seconds:.1f} tok/s, {seconds / tokens * 1e3:.3f} ms a step")
    if before is not None and (after := run.model.experts.stats()) is not None:
        each = {name: (getattr(after.total, name) - getattr(before.total, name)) / tokens for name in COUNTED}
        print(
            f"    experts a step: {each['hits'] - each['foretold']:.1f} in slots, {each['foretold']:.1f} prefetched, "
            f"{each['misses']:.1f} not; {each['fetched']:.1f} fetched, {each['cpu_experts']:.1f} on the CPU, "
            f"{each['admitted']:.1f} admitted; waited {each['waited_ns'] / 1e3:.0f} us"
        )
    print(f"    the graph alone, again and again: {_graph_ms(run, batch):.3f} ms a step")
    print("\n".join(profile_of(lambda: run.decode(PROFILED), PROFILED)))


def _graph_ms(run: Run, batch: int) -> float:
    """Milliseconds of a step on the GPU, without what the host does between two steps. The last tokens once more."""
    assert run.model.steps is not None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run.model.experts.wake()
    start.record()
    for _ in range(PROFILED):
        run.model.steps.again(batch, run.cache)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / PROFILED


def _prefill(model: GpuDecoder, cache: CacheTensors, length: int) -> None:
    with tuning():
        Run(model, cache, 1).prefill(length, length)
    times = [Run(model, cache, 1).prefill(length, length) for _ in range(3)]
    best = min(times)
    print(f"\nprefill of {length} tokens: {best * 1e3:.1f} ms, {length / best:.0f} tok/s")
    print("\n".join(profile_of(lambda: Run(model, cache, 1).prefill(length, length), 1)[:16]))


def profile_of(work: Callable[[], object], steps: int) -> list[str]:
    """Lines: microseconds a step of each part, and of the kernels that take most, as torch's profiler has them."""
    found = seen(work)
    kernels: dict[str, list[float]] = defaultdict(list)
    for run in found:
        kernels[run.name].append(run.end - run.start)
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:24]
    lines = divide(found, steps).lines()
    for name, times in ordered:
        lines.append(f"        {sum(times) / steps:8.1f} us {len(times) / steps:7.1f}x {name[:90]}")
    return lines


def _say(what: str, start: float) -> None:
    used = torch.cuda.memory_allocated() / (1 << 30)
    print(f"{what}: {time.perf_counter() - start:.1f} s, {used:.2f} GiB of the GPU's memory", flush=True)


if __name__ == "__main__":
    main()
