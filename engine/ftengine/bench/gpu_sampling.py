"""Choosing tokens on the GPU: time, bytes per second, and whether the CPU's sampler chooses the same.

    python -m ftengine.bench.gpu_sampling

Each case is a captured graph of a chain of calls on different logits, so that they do not come from the L2 cache, as
in a step they would. Bytes are the logits, read once. `queue` is what the host takes to launch one call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_sampling", __doc__)

import torch

from ftengine.bench.gpu_mixers import captured
from ftengine.core import SamplingParams
from ftengine.scheduler.device_sampler import DeviceSampler, Drawn
from ftengine.scheduler.sampler import SamplingState, sample

VOCABULARY, CALLS = 248320, 20
DEVICE = torch.device("cuda")
CASES = {
    "greedy": SamplingParams(1, temperature=0.0),
    "temperature 1": SamplingParams(1),
    "temperature 0.7, top_k 20, top_p 0.8": SamplingParams(1, temperature=0.7, top_k=20, top_p=0.8),
    "top_p 0.95": SamplingParams(1, top_p=0.95),
    "min_p 0.05": SamplingParams(1, min_p=0.05),
}


def states(params: SamplingParams, rows: int) -> list[SamplingState]:
    seeded = [
        {**{name: getattr(params, name) for name in params.__struct_fields__}, "seed": row} for row in range(rows)
    ]
    return [SamplingState(SamplingParams(**values), [0], VOCABULARY) for values in seeded]


def queue_time(call: Callable[[], Drawn]) -> float:
    """Microseconds."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def report(name: str, params: SamplingParams, rows: int, logits: list[torch.Tensor]) -> str:
    sampler = DeviceSampler(VOCABULARY, rows, DEVICE)
    drawn = sampler.queue(logits[0], states(params, rows))
    torch.cuda.synchronize()
    wide = int((drawn.tokens < 0).sum())
    found = [choice.token for choice in drawn.choices() if choice is not None]
    expected = [choice.token for choice in sample(logits[0].cpu(), states(params, rows)) if choice is not None]
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    host = queue_time(lambda: sampler.queue(logits[0], states(params, rows)))

    def choose(each: torch.Tensor) -> None:
        sampler.queue(each, states(params, rows))

    microseconds = captured([partial(choose, each) for each in logits])
    rate = rows * VOCABULARY * 4 / microseconds / 1e3
    return f"{name:<38} {rows:>2} {microseconds:>8.1f} {rate:>8.0f} {host:>8.0f} {equal:>3} of {rows} {wide:>5}"


def main() -> None:
    parse("gpu_sampling", __doc__)
    print(f"{'case':<38} {'B':>2} {'us':>8} {'GB/s':>8} {'queue us':>8} {'as the CPU':>8} {'wide':>5}")
    for rows in (1, 8):
        logits = [3 * torch.randn(rows, VOCABULARY, device=DEVICE) for _ in range(CALLS)]
        for name, params in CASES.items():
            print(report(name, params, rows, logits))


if __name__ == "__main__":
    main()
