"""Compiles kernels side by side, before they are launched for the first time one after the other.

A kernel's code depends on the types, alignments and constants of a launch, so what has to be compiled is found by
making the launches without their effect: each is noted, and Triton compiles those that differ, or finds them on disk,
on threads of its own (most of the time is spent outside of Python), which also load them. The launches proper then find
them ready. Kernels of a library that Triton would time are compiled in all their configurations, unless the outcome is
on disk already.

Triton's inner parts are at work here (3.6: JITFunction.run, Autotuner, AsyncCompileMode, CompiledKernel). Whatever goes
wrong costs only time: kernels are compiled or loaded at their launch then. FT_PRECOMPILE=0 turns it off.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ftengine.kernels.triton.source_keys import read_sources, settle

log = logging.getLogger("ftengine.precompile")

MOST_THREADS = 16
Compiled = Callable[[int, int], None]  # how many are done, of how many
# Whose kernels are launched: this project's, and those of fla-core's modules that delta_prefill.py imports.
PACKAGES = ("ftengine.kernels.triton", "fla.ops")

settle()  # whoever computes with a model imports this before a kernel is launched


class _Untimed(Exception):
    """Raised where Triton would begin to time configurations."""


def precompile(launch: Callable[[], None], done: Compiled) -> int:
    """Compiles the kernels that `launch` launches, and launches none. Returns how many different ones there are.

    launch: in one thread, and nothing else may launch kernels of Triton's meanwhile. What its kernels would write
    stays as it is, so nothing in it may rely on that. 0: turned off, or it failed, of which the log tells.
    """
    if os.environ.get("FT_PRECOMPILE") == "0":
        log.info("kernels are not compiled ahead: FT_PRECOMPILE=0")
        return 0
    start = time.perf_counter()
    try:
        count, on_disk = _compile(launch, done)
    except Exception as error:
        log.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
        log.debug("the error in full", exc_info=True)
        return 0
    log.info(
        "%d kernels in %.1f s: %d found on disk, %d compiled",
        count, time.perf_counter() - start, on_disk.found, on_disk.compiled,
    )  # fmt: skip
    return count


@dataclass
class OnDisk:
    """Of what was to be compiled: what was there. Counts are right when all threads are done."""

    found: int = 0
    compiled: int = 0

    def listen(self, *, cache_hit: bool, **others: Any) -> None:
        if cache_hit:
            self.found += 1
        else:
            self.compiled += 1


class _LoadingThreads(ThreadPoolExecutor):
    """Compile, and load what they compiled."""

    def submit(self, compile: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(lambda: _loaded(compile(*args, **kwargs)))


def _loaded(kernel: Any) -> Any:
    """With its code on the GPU and what launches it, both of which its first launch would see to."""
    try:
        kernel._init_handles()
    except Exception:  # its launch tells
        log.debug("%s is not loaded ahead", getattr(kernel, "name", "a kernel"), exc_info=True)
    return kernel


def _compile(launch: Callable[[], None], done: Compiled) -> tuple[int, OnDisk]:
    from triton.runtime._async_compile import AsyncCompileMode

    with (
        listening() as on_disk,
        _LoadingThreads(_threads(), thread_name_prefix="compile") as threads,
        # What does not compile is left to its launch, where the error has its place.
        AsyncCompileMode(threads, ignore_errors=True) as mode,
    ):
        with submitting() as seen:
            launch()
        compiling = list(mode.raw_futures)
        for number, _ in enumerate(as_completed(compiling), 1):
            done(number, len(compiling))
    return len(seen), on_disk


@contextmanager
def listening() -> Iterator[OnDisk]:
    """Counts what Triton compiles inside and what it finds, unless somebody listens already."""
    found, before = OnDisk(), knobs.compilation.listener
    if before is None:
        knobs.compilation.listener = found.listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def load_compiler() -> None:
    """What Triton asks of itself before the first kernel: a sum over its own files. For a thread beside other work."""
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except Exception:  # the first kernel needs it and tells
        log.debug("Triton's key is not known ahead", exc_info=True)


def load_sources() -> None:
    """Reads the sources of all kernels that were imported, which is half of finding them on disk. For a thread beside
    other work."""
    try:
        read_sources(PACKAGES)
    except Exception:  # each kernel's first launch does it
        log.debug("sources of kernels are not read ahead", exc_info=True)


def kinds(launch: Callable[[], None]) -> set[Hashable]:
    """What tells apart the kernels that `launch` launches; it launches none, and what it would write stays as it is.

    As for `precompile`. Raises what the launches, or changed inner parts of Triton, raise.
    """
    run, run_tuned, bench = JITFunction.run, Autotuner.run, Autotuner._bench
    seen: set[Hashable] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.add((id(self), specialization(self, args, kwargs)))

    _replace(note, run_tuned, bench)
    try:
        launch()
    finally:
        _replace(run, run_tuned, bench)
    return seen


@contextmanager
def submitting() -> Iterator[set[Hashable]]:
    """Inside, a launch hands its kernel to the compiler if it is the first of its kind, and does nothing else.

    Yields what tells the kernels apart.
    """
    run, run_tuned, bench = JITFunction.run, Autotuner.run, Autotuner._bench
    seen: set[Hashable] = set()

    def submit(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        key = (id(self), specialization(self, args, kwargs))
        if key in seen:
            return None
        seen.add(key)
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def submit_tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run_tuned(self, *args, **kwargs)
        except _Untimed:
            kwargs.pop("warmup", None)
            return self.warmup(*args, **kwargs)

    def untimed(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Untimed

    _replace(submit, submit_tuned, untimed)
    try:
        yield seen
    finally:
        _replace(run, run_tuned, bench)


def specialization(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What of a launch's arguments and options the kernel's code depends on, as JITFunction.run finds it."""
    options = {
        **kwargs,
        "debug": kwargs.get("debug", kernel.debug) or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    binder = kernel.device_caches[driver.active.get_current_device()][-1]
    _, types, options = binder(*args, **options)
    return tuple(types), str(options)


def _replace(run: Any, run_tuned: Any, bench: Any) -> None:
    # mypy refuses assignments to methods, which is right anywhere else.
    setattr(JITFunction, "run", run)  # noqa: B010
    setattr(Autotuner, "run", run_tuned)  # noqa: B010
    setattr(Autotuner, "_bench", bench)  # noqa: B010


def _threads() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, cpus)
