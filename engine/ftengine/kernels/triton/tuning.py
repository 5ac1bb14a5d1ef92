"""Which launch configuration of a kernel is fastest here: timed once a machine, at warm-up, and kept on disk.

At a request nothing is timed: `choose` gives what the cache has, else the first candidate, which is a good one for an
H200. The cache is `tuning.json` in the folder given to `use_cache`; it names the GPU and the versions of Triton and of
this project, and what does not match them or the candidates at hand is measured anew. Timing has a budget for the whole
process; what it does not reach takes the first candidate, for good: no later start waits again.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton

from ftengine.atomic import write_atomically
from ftengine.private import private_folder

log = logging.getLogger("ftengine.tuning")

Config = dict[str, Any]  # launch arguments: a kernel's constants, num_warps, num_stages
Key = tuple[int | str | bool, ...]

FILE_NAME = "tuning.json"
WARM_UP, REPEATS = 2, 9
BUDGET_SECONDS = 30.0  # of timing in a process, the candidates' compilation included
# GPUs on which candidates were measured by hand, with bench/gpu_linear.py, gpu_experts.py and gpu_mixers.py, and stand
# in the order that came of it: nothing is timed there.
MEASURED = ("H200",)
FLUSH_BYTES = 256 << 20  # written between two runs so that no weights lie in the L2 cache


class Tuner:
    """Choices by kernel and key. `folder`: where they are kept, None: nowhere. seconds: of timing; clock: tells them.

    enabled: what is not known may be timed; listing: its candidates are launched once instead, to be compiled.
    """

    def __init__(
        self,
        folder: Path | None = None,
        seconds: float = BUDGET_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.folder = folder
        self.enabled = False
        self.listing = False
        self._left = seconds
        self._clock = clock
        self._chosen: dict[str, Config] = _read(folder) if folder is not None else {}
        self._changed = False

    def choose(self, kernel: str, key: Key, candidates: Sequence[Config], run: Callable[[Config], None]) -> Config:
        if len(candidates) == 1:
            return candidates[0]
        name = f"{kernel}{list(key)}"
        known = self._chosen.get(name)
        if known is not None and known in candidates:
            return known
        if not self.enabled or not _worth_timing() or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        if self.listing:
            for candidate in candidates:
                run(candidate)
            return candidates[0]
        best = self._timed(name, candidates, run)
        self._chosen[name] = best
        self._changed = True
        return best

    def _timed(self, name: str, candidates: Sequence[Config], run: Callable[[Config], None]) -> Config:
        """The first candidate once the budget is used up; what began in time is finished."""
        if self._left <= 0:
            return candidates[0]
        start = self._clock()
        best = _fastest(name, candidates, run)
        self._left -= self._clock() - start
        if self._left <= 0:
            log.info("kernels were tuned for as long as a start may take; the others have their default settings")
        return best

    def save(self) -> None:
        """Merges with what other processes have written meanwhile; a folder that cannot be written is only logged."""
        if self.folder is None or not self._changed:
            return
        merged = {**_sections(self.folder), _machine(): {**_read(self.folder), **self._chosen}}
        try:
            path = private_folder(self.folder) / FILE_NAME
            write_atomically(path, json.dumps(merged, indent=1, sort_keys=True).encode())
        except OSError as error:
            log.warning("the tuning of kernels is not kept: %s", error)
        else:
            self._changed = False


_tuner = Tuner()


def use_cache(folder: Path | None) -> None:
    """From now on choices are read from and kept in `folder`/tuning.json; None: only in this process."""
    global _tuner
    _tuner = Tuner(folder)


@contextmanager
def tuning() -> Iterator[None]:
    """Inside, `choose` times candidates that it has no choice for; at the end new choices are written to disk."""
    tuner = _tuner
    before, tuner.enabled = tuner.enabled, True
    try:
        yield
    finally:
        tuner.enabled = before
        tuner.save()


@contextmanager
def listing() -> Iterator[None]:
    """Inside, `choose` launches what `tuning` would time, each once: for precompile.py, where that only compiles."""
    tuner = _tuner
    before = tuner.enabled, tuner.listing
    tuner.enabled = tuner.listing = True
    try:
        yield
    finally:
        tuner.enabled, tuner.listing = before


def bucket(tokens: int) -> int:
    """For keys: steps of 2 to 8 and of 9 to 16 tokens share what is chosen for them."""
    return 1 if tokens == 1 else 8 if tokens <= 8 else 16


def choose(kernel: str, key: Key, candidates: Sequence[Config], run: Callable[[Config], None]) -> Config:
    """The configuration of `candidates` to launch `kernel` with, for shapes and formats that `key` tells apart.

    run: launches the kernel with a candidate on the current stream, as often as it is called: what it writes must be
    scratch. A candidate that does not compile or fit here is left out. Never times while a graph is captured.
    """
    return _tuner.choose(kernel, key, candidates, run)


def _worth_timing() -> bool:
    return torch.cuda.is_available() and not any(name in torch.cuda.get_device_name() for name in MEASURED)


def _fastest(name: str, candidates: Sequence[Config], run: Callable[[Config], None]) -> Config:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    timed: list[tuple[float, int]] = []
    for index, candidate in enumerate(candidates):
        try:
            timed.append((milliseconds(partial(run, candidate), flush), index))
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            log.debug("%s: %s does not fit: %s", name, candidate, error)
    if not timed:
        return candidates[0]  # launching it tells what is wrong
    time, index = min(timed)
    log.debug("%s: %.1f us with %s", name, time * 1e3, candidates[index])
    return candidates[index]


def milliseconds(run: Callable[[], None], flush: torch.Tensor, repeats: int = REPEATS) -> float:
    """Median over `repeats` runs on the GPU, each after `flush` was written through the L2 cache."""
    for _ in range(WARM_UP):
        run()
    events = []
    for _ in range(repeats):
        # The flush takes longer than queueing what follows, so launch overhead is not in the figure.
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events)


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    try:
        version = metadata.version("ftlaunch")
    except metadata.PackageNotFoundError:
        version = "from source"
    return f"{device}, triton {triton.__version__}, ftlaunch {version}"


def _read(folder: Path) -> dict[str, Config]:
    """This machine's choices; what is not of their form is not among them."""
    section = _sections(folder).get(_machine())
    if not isinstance(section, dict):
        return {}
    return {name: config for name, config in section.items() if isinstance(config, dict)}


def _sections(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is left aside, kernels are tuned anew: %s", path, error)
        return {}
    return found
