"""`python -m ftlaunch.bench.bandwidth_child ASKED`: the measurement of `ft bench bw`, in a process of its own.

Each event is a line of JSON on its standard output: how far it is, what is to be said, a result, or what went wrong.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import TextIO

from ftlaunch.bench.bandwidth import Asked, Failed, Result, Said, Shown
from ftlaunch.machine.process import own_output


class _Said(logging.Handler):
    """What the engine logs about its profile and caches, for whoever waits."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.send(Said(record.getMessage()))


class Events:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def send(self, event: Shown | Said | Result | Failed) -> None:
        import msgspec

        self._out.write(msgspec.json.encode(event).decode() + "\n")
        self._out.flush()

    def show(self, stage: str, fraction: float) -> None:
        self.send(Shown(stage, fraction))


def main() -> int:
    asked, events = Asked.from_json(sys.argv[1]), Events(own_output())
    logging.getLogger("ftengine").addHandler(_Said(events))
    logging.getLogger("ftengine.profile").setLevel(logging.INFO)
    try:
        _measure(asked, events)
    except Exception as error:
        if os.environ.get("FT_DEBUG") == "1":
            traceback.print_exc()
        events.send(_failure(error))
    return 0


def _measure(asked: Asked, events: Events) -> None:
    from ftengine.memory.folders import cache_folder, use_kernel_cache

    if asked.device == "cuda":
        use_kernel_cache()
    events.show("Loading PyTorch", 0.0)
    import torch

    from ftengine.kernels.choice import choose_kernels
    from ftlaunch.bench.bandwidth_lanes import measured

    choose_kernels()
    torch.set_num_threads(1)  # torch's threads spin for milliseconds after an operation, on cores that are measured
    for number in range(len(asked.layouts)):
        events.send(
            measured(asked.layout(number), asked.device, asked.threads, cache_folder(), asked.fresh, events.show)
        )


def _failure(error: Exception) -> Failed:
    from ftengine.errors import FtError
    from ftengine.memory.gpu_errors import is_out_of_memory

    if isinstance(error, FtError):
        return Failed(str(error), error.next_step)
    if isinstance(error, ModuleNotFoundError):
        return Failed(
            f"the Python package {error.name or error} is missing or broken", "pip install --force-reinstall ftlaunch"
        )
    if isinstance(error, ImportError):  # it is there, but the system refuses it: addresses are limited, say
        return Failed(f"PyTorch cannot be loaded: {_first_line(error)}", "ft doctor, which tells of limits")
    if isinstance(error, MemoryError):
        return Failed("this machine has not enough free memory for that", "close other programs")
    if is_out_of_memory(error):
        return Failed(
            "not enough memory is free on the GPU, or can be pinned for it", "ft doctor, which tells who holds it"
        )
    what = f"{type(error).__name__}: {_first_line(error)}"
    return Failed(f"the lanes cannot be measured: {what}", "ft doctor; FT_DEBUG=1 shows where")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


if __name__ == "__main__":
    # Libraries of a driver that is out of order may also hang in what they do at exit.
    status = main()
    os._exit(status)
