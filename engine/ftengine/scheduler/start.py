"""From an EngineConfig to a running Engine. Torch-free until `start` runs: the GPU's driver is asked meanwhile, and
weights are begun to be read (scheduler/reading.py).

scheduler/start_cpu.py and scheduler/start_gpu.py do what follows the choice of a device.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from ftengine.config import EngineConfig, Resolved, facts
from ftengine.errors import ConfigError
from ftengine.kernels.choice import choose_kernels
from ftengine.memory import estimate
from ftengine.memory.folders import use_kernel_cache
from ftengine.memory.gpu import Gpu, NoGpu, choose_device, interpreter, probe, refuse_without_gpu
from ftengine.memory.plan import check_context, resolve_dtype, resolve_threads
from ftengine.memory.sizes import gigabytes
from ftengine.scheduler.beginning import Beginning, Progress
from ftengine.scheduler.reading import read_ahead, short_turns
from ftengine.scheduler.timeline import Timeline
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.ftw.files import FtwFiles
from ftengine.weights.open import open_files, open_source
from ftengine.wire import Ready

if TYPE_CHECKING:
    from ftengine.scheduler.engine import Engine

log = logging.getLogger(__name__)


def start(config: EngineConfig, progress: Progress, wake: Callable[[], None] = lambda: None) -> tuple[Engine, Ready]:
    """wake: called from other threads when the step loop, should it sleep, has something to look at.

    Raises FtError or MemoryError, with what is wrong and how much is missing.
    """
    timeline = Timeline()
    checkpoint = Checkpoint.open(config.model_dir)
    check_context(config, checkpoint.max_context)
    with open_files(checkpoint) or nullcontext() as files:  # whatever happens, nothing is read any more afterwards
        timeline.mark("headers")
        return _start(config, checkpoint, files, progress, timeline, wake)


def _start(
    config: EngineConfig,
    checkpoint: Checkpoint,
    files: FtwFiles | None,
    progress: Progress,
    timeline: Timeline,
    wake: Callable[[], None],
) -> tuple[Engine, Ready]:
    """files: of FTW; None for other models, which are opened and read once torch is there."""
    with _beside(config, checkpoint, files) as (gpu_found, reading):
        import torch

        gc.freeze()  # its modules live on: to look through them cost the first request, or readiness, 0.15 s
        timeline.mark("torch")
        gpu, memory = gpu_found(), reading()
    timeline.mark("driver")
    if files is not None and memory is not None:
        log.info("weights: %s of them read while PyTorch was imported", gigabytes(files.bytes_ahead()))
    device = choose_device(config.device, gpu, torch.version.cuda)
    threads = resolve_threads(config.threads)
    torch.set_num_threads(threads.value)
    kernels = choose_kernels()
    import_plugins(os.environ.get("FT_PLUGINS", ""))
    weights = open_source(files or checkpoint)
    sizes = estimate.weight_sizes(weights, checkpoint.text_config)
    timeline.mark("headers")

    def beginning(device: str) -> Beginning:
        dtype = resolve_dtype(config.dtype, device=device)
        return Beginning(config, checkpoint, weights, sizes, threads, dtype, progress, timeline, wake, memory)

    started = None
    if device.value != "cpu":
        use_kernel_cache()
        from ftengine.scheduler.start_gpu import start_on_gpu

        assert isinstance(gpu, Gpu)
        device, started = start_on_gpu(beginning(device.value), gpu, device)
    if started is None:
        refuse_without_gpu(config, "--device cpu was given" if config.device == "cpu" else device.reason)
        from ftengine.scheduler.start_cpu import start_on_cpu

        device, started = Resolved("cpu", device.reason), start_on_cpu(beginning("cpu"))
    dtype = resolve_dtype(config.dtype, device=device.value)
    known = facts(device=device, threads=threads, kernels=kernels, dtype=dtype, **started.facts)
    for name, fact in known.items():
        log.info("%s: %s (%s)", name, fact["value"], fact["reason"])
    log.info("%s", timeline)
    return started.engine, Ready(
        architecture=checkpoint.architecture,
        context_length=started.context,
        max_running=started.max_running,
        dtype=dtype.value,
        device=device.value,
        kv_tokens=started.kv_tokens,
        facts=known,
    )


@contextmanager
def _beside(
    config: EngineConfig, checkpoint: Checkpoint, files: FtwFiles | None
) -> Iterator[tuple[Callable[[], Gpu | NoGpu], Callable[[], Resolved[int] | None]]]:
    """While the block runs the driver is asked for its GPU, and reading is begun. Gives what waits for the answers."""
    with short_turns(), ThreadPoolExecutor(2, thread_name_prefix="beside") as threads:
        gpu = threads.submit(_ask, config.device)
        reading = threads.submit(lambda: None if files is None else read_ahead(config, checkpoint, files, gpu.result))
        yield gpu.result, reading.result


def _ask(device: str) -> Gpu | NoGpu:
    if device == "cpu":
        return NoGpu("asked for the CPU")
    return interpreter() if device == "interpret" else probe()


def import_plugins(names: str) -> None:
    """Imports the comma-separated modules; they may register architectures. Raises ConfigError."""
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"the module {name}, named in FT_PLUGINS, cannot be imported: {type(error).__name__}: {error}",
                "unset FT_PLUGINS",
            ) from error
