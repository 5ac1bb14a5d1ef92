"""Times a whole model through the scheduler: prefill, decode at several batch sizes, and what is not kernels.

    python -m ftengine.bench.whole_model [--layers 8 --format nvfp4 --dtype bfloat16 --batches 1 4] [--model DIR]

Without --model: random weights in the exact shape of Qwen3.6-35B-A3B, cut to so many layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ftengine.bench.synthetic import synthetic_model
from ftengine.config import EngineConfig
from ftengine.core import Request, SamplingParams
from ftengine.formats.format import FORMATS
from ftengine.models.base import Model, ModelOptions, load
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.start_cpu import build_engine, leave_cores_to
from ftengine.weights.checkpoint import Checkpoint

RUNS = 5  # of a prefill


@dataclass
class Decode:
    """Medians over the steps of `batch` sequences."""

    batch: int
    tokens_per_second: float  # of all sequences together
    step_ms: float
    outside_ms: float  # of a step: scheduler, batch building, sampling
    parts_ms: dict[str, float]  # of a step, inside: Decoder.take_times of the native library


@dataclass
class WholeModel:
    prefill_tokens: int
    prefill_tokens_per_second: float
    prefill_parts_ms: dict[str, float]  # of one prompt
    decodes: list[Decode] = field(default_factory=list)


class _Clock:
    """A model whose forwards are timed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Any, cache: Any) -> torch.Tensor:
        start = time.perf_counter()
        logits = self.model.forward(batch, cache)
        self.seconds.append(time.perf_counter() - start)
        return logits


def measure(model: Model, *, prompt: int = 128, batches: tuple[int, ...] = (1, 4), tokens: int = 64) -> WholeModel:
    """Runs requests of `prompt` tokens, each answered by `tokens` greedy ones, and gives medians."""
    leave_cores_to(model)
    clock = _Clock(model)
    config = EngineConfig("", context=prompt + tokens + 64, max_running_requests=max(batches), prefill_chunk=prompt)
    engine, _ = build_engine(config, clock)
    engine.warm_up()
    _take_parts(model, 1)
    prefills = [_prefill(engine, prompt, number) for number in range(RUNS)]
    found = WholeModel(prompt, prompt / statistics.median(prefills), _take_parts(model, RUNS))
    found.decodes = [_decode(engine, clock, batch, prompt, tokens) for batch in batches]
    return found


def _prefill(engine: Engine, length: int, seed: int) -> float:
    """Seconds of a prompt's one step."""
    engine.budget.tokens = length
    _submit(engine, f"prefill {seed}", length, 1, seed)
    start = time.perf_counter()
    while engine.has_work:
        engine.admit()
        engine.step()
    return time.perf_counter() - start


def _decode(engine: Engine, clock: _Clock, batch: int, prompt: int, tokens: int) -> Decode:
    for number in range(batch):
        _submit(engine, f"decode {batch} {number}", prompt, tokens, 100 * batch + number)
    while any(job.sequence.generated < 2 for job in engine.scheduler.jobs.values()):
        engine.admit()
        engine.step()
    _take_parts(clock.model, 1)
    steps: list[float] = []
    clock.seconds.clear()
    while len(engine.scheduler.jobs) == batch:
        start = time.perf_counter()
        engine.admit()
        engine.step()
        steps.append(time.perf_counter() - start)
    step = statistics.median(steps)
    return Decode(
        batch=batch,
        tokens_per_second=batch / step,
        step_ms=step * 1e3,
        outside_ms=1e3 * statistics.median(a - b for a, b in zip(steps, clock.seconds, strict=True)),
        parts_ms=_take_parts(clock.model, len(steps)),
    )


def _take_parts(model: Model, runs: int) -> dict[str, float]:
    """Milliseconds a run since the last call; empty without the native decoder."""
    native = getattr(model, "native", None)
    return {} if native is None else {name: 1e3 * seconds / runs for name, seconds in native.take_times().items()}


def _submit(engine: Engine, name: str, prompt: int, tokens: int, seed: int) -> None:
    ids = torch.randint(engine.model.vocab_size, (prompt,), generator=torch.Generator().manual_seed(seed)).tolist()
    engine.submit(Request(name, ids, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a whole model.")
    parser.add_argument("--model", help="a model folder instead of random weights")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--format", default="nvfp4", choices=["nvfp4", "bf16"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model:
        model = load(Checkpoint.open(options.model), ModelOptions(options.dtype))
    else:
        model = synthetic_model(options.layers, options.dtype, FORMATS[options.format])
    found = measure(model, prompt=options.prompt, batches=tuple(options.batches), tokens=options.tokens)
    print(
        f"prefill of {found.prefill_tokens} tokens: {found.prefill_tokens_per_second:.1f} tokens/s: "
        + ", ".join(f"{name} {value:.1f} ms" for name, value in found.prefill_parts_ms.items())
    )
    for decode in found.decodes:
        inside = sum(decode.parts_ms.values())
        print(
            f"decode, batch {decode.batch}: {decode.tokens_per_second:.1f} tokens/s, {decode.step_ms:.2f} ms a step, "
            f"{decode.outside_ms:.3f} ms of it outside the model ({decode.outside_ms / decode.step_ms:.1%}), "
            f"{decode.step_ms - decode.outside_ms - inside:.3f} ms around its parts: "
            + ", ".join(f"{name} {value:.2f}" for name, value in decode.parts_ms.items())
        )


if __name__ == "__main__":
    main()
