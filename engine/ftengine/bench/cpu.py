"""`ft bench cpu`: the machine's read bandwidth, and one layer of experts in every format against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ftengine.bench.layer import Bank, Shape, Timing
from ftengine.bench.memory import bytes_to_read, fits, processor_name, read_bandwidth
from ftengine.bench.whole_model import WholeModel, measure
from ftengine.config import Resolved
from ftengine.errors import ConfigError
from ftengine.formats.format import FORMATS
from ftengine.kernels import native
from ftengine.kernels.choice import choose_kernels
from ftengine.memory.machine import available_memory
from ftengine.memory.plan import resolve_dtype, resolve_threads
from ftengine.models.base import ModelOptions, load
from ftengine.weights.checkpoint import Checkpoint

BATCHES = (1, 8, 64)
BFLOAT16_VERSIONS = ("amx", "avx512_bf16")  # the others compute in float32 whatever activations are

Progress = Callable[[str, float], None]  # stage, fraction 0..1


@dataclass(frozen=True)
class Report:
    """bandwidth: bytes a second by number of threads. dtype: of the activations."""

    processor: str
    date: str
    kernels: Resolved[str]
    dtype: str
    shape: Shape
    bandwidth: dict[int, float]
    timings: list[Timing] = field(default_factory=list)

    def share(self, timing: Timing) -> float:
        """Of the read bandwidth of as many threads."""
        return timing.bytes_per_second / self.bandwidth[timing.threads]

    def as_json(self) -> dict[str, Any]:
        rows = [
            asdict(timing) | {"bytes_per_second": timing.bytes_per_second, "share_of_bandwidth": self.share(timing)}
            for timing in self.timings
        ]
        return {
            "processor": self.processor,
            "date": self.date,
            "kernels": {"value": self.kernels.value, "reason": self.kernels.reason},
            "activations": self.dtype,
            "shape": asdict(self.shape),
            "read_bytes_per_second": self.bandwidth,
            "layers": rows,
        }


def run(formats: tuple[str, ...], threads: int | None, progress: Progress, shape: Shape | None = None) -> Report:
    """Raises ConfigError where it cannot be measured: no native library, not enough memory, an FT_ISA of elsewhere."""
    shape = shape or Shape()
    if not native.AVAILABLE:
        raise ConfigError(f"there is nothing to measure: {native.REASON}", "pip install --force-reinstall ftlaunch")
    kernels = choose_kernels()
    torch.set_num_threads(1)  # torch's threads spin for milliseconds after an operation, on cores that are measured
    most = min(resolve_threads(threads).value, native.granted_threads())
    counts = (1, most) if most > 1 else (1,)
    size = bytes_to_read()
    check_memory(formats, shape, size)
    dtype = torch.bfloat16 if kernels.value in BFLOAT16_VERSIONS else torch.float32
    progress("reading memory", 0.0)
    bandwidth = read_bandwidth(counts, size)
    report = Report(
        processor=processor_name(),
        date=date.today().isoformat(),
        kernels=kernels,
        dtype=str(dtype).removeprefix("torch."),
        shape=shape,
        bandwidth=bandwidth,
    )
    for number, timing in enumerate(_timings(formats, counts, shape, dtype), 1):
        report.timings.append(timing)
        progress("timing layers", number / (len(formats) * len(counts) * len(BATCHES)))
    return report


def run_model(directory: Path, threads: int | None, progress: Progress) -> WholeModel:
    """Prefill and decode of the model in `directory`, as `ft serve` would run it. Raises FtError, MemoryError."""
    choose_kernels()
    count = resolve_threads(threads).value
    torch.set_num_threads(count)
    checkpoint = Checkpoint.open(directory)
    dtype = resolve_dtype("auto")
    model = load(checkpoint, ModelOptions(dtype=dtype.value, threads=count, progress=progress))
    return measure(model)


def check_memory(formats: tuple[str, ...], shape: Shape, size: int) -> None:
    """Raises ConfigError unless the largest single thing that is measured fits into free memory."""
    largest = max(formats, key=lambda name: shape.bank_bytes(FORMATS[name]))
    needed = max(size, shape.bank_bytes(FORMATS[largest]))
    available, what = available_memory()
    if not fits(needed, available):
        raise ConfigError(
            f"measuring {largest} needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are there ({what})",
            "close other programs, or measure a smaller format: ft bench cpu --format nvfp4",
        )


def _timings(formats: tuple[str, ...], counts: tuple[int, ...], shape: Shape, dtype: torch.dtype) -> Iterator[Timing]:
    with torch.inference_mode():
        for name in formats:
            bank = Bank(shape, FORMATS[name])  # one at a time
            for threads in counts:
                for batch in BATCHES:
                    yield bank.time(batch, threads, dtype)
            del bank
