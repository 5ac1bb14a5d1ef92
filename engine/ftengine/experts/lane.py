"""The CPU's lane: threads that compute the experts which a GPU hands over through a mailbox.

The threads are the process's pool (csrc/team.h). While the lane is awake it holds them, spinning; other callers of
native kernels get them between two requests. It falls asleep after `patience` seconds without a request.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import numpy
import numpy.typing
import torch

from ftengine import _native
from ftengine.experts.mailbox import CLOSED, error_of
from ftengine.experts.pool import ExpertBank
from ftengine.kernels import native
from ftengine.kernels.triton.buffers import Mailbox

LOGGED = 4096  # requests that the lane keeps the times of
PATIENCE = 0.003  # seconds; a step of decoding is about as long, and pauses within it are far shorter
PULSE = 1.0  # seconds; kernels/triton/system.py counts in these


@dataclass(frozen=True)
class LaneCounts:
    """Of all requests so far. experts: distinct ones a request, summed; seconds: from the bell to the reply.

    layer_seconds: the same by MoE layer; requests that were refused are of none.
    """

    requests: int
    routes: int
    experts: int
    seconds: float
    awakenings: int
    layer_seconds: tuple[float, ...]


class Lane:
    """Serves `mailbox` from its making on until `close`."""

    def __init__(
        self, banks: Sequence[ExpertBank], mailbox: Mailbox, threads: int, *, patience: float = PATIENCE, isa: str = ""
    ) -> None:
        """banks: by MoE layer number; all of the mailbox's hidden size. They and the mailbox must not be moved.

        `isa` names a version of the kernels other than the one in use. Raises ValueError for banks that do not fit.
        """
        self.mailbox = mailbox
        self.threads = min(threads, native.granted_threads())
        self._native = _native.Lane(
            [_described(bank) for bank in banks],
            mailbox.bell, mailbox.ids, mailbox.weights, mailbox.rows, mailbox.reply, mailbox.out, mailbox.error,
            threads, patience, isa,
        )  # fmt: skip
        closing = threading.Event()
        pulse = threading.Thread(target=_pulse, args=(mailbox.error, closing), name="pulse", daemon=True)
        pulse.start()
        # Pinned memory goes with the CUDA context, before the interpreter's objects do: nobody may look at it then.
        self._finalizer = weakref.finalize(self, _close, self._native, mailbox.error, pulse, closing, os.getpid())

    def wake(self) -> None:
        """Before a graph is launched that may ring. Under a microsecond, some more where the threads sleep."""
        self._native.wake()

    @property
    def awake(self) -> bool:
        return bool(self._native.awake)

    def counts(self) -> LaneCounts:
        return LaneCounts(**self._native.counts())

    def log(self) -> numpy.typing.NDArray[numpy.int64]:
        """The last requests, int64 [N, 5], oldest first: number, distinct experts, routes, ns from the bell to the
        reply, ns from the reply before to the bell."""
        found = numpy.empty((LOGGED, 5), numpy.int64)
        return found[: self._native.copy_log(found)]

    def error(self) -> str | None:
        """What went wrong, the GPU's waiting in vain included; None if nothing did."""
        return error_of(self.mailbox)

    def request(
        self, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, limit: float = 20.0
    ) -> tuple[torch.Tensor, float]:
        """Plays the GPU's part: rows [T, H], ids [T, K], weights [T, K] -> out float32 [T, H], seconds to the reply.

        For tests and measurements, never while a GPU uses the mailbox. Raises TimeoutError.
        """
        tokens = len(rows)
        self.mailbox.rows[:tokens], self.mailbox.ids[:tokens] = rows, ids
        self.mailbox.weights[:tokens] = weights
        seconds = self._native.request(layer, tokens, limit)
        return self.mailbox.out[:tokens].clone(), seconds

    def close(self) -> None:
        """Returns once the request under way is served; the mailbox is not looked at any more, and says so to a GPU
        that asks. May be called again."""
        self._finalizer()

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pulse(error: torch.Tensor, closing: threading.Event) -> None:
    """Tells a GPU that waits for the CPU that this process runs. It does not while it is stopped (Ctrl-Z, a debugger, a
    machine that sleeps): then the GPU waits on, where it would otherwise give a lane up that has had no time.
    """
    line = error.numpy()
    while not closing.wait(PULSE):
        line[1] += 1


def _close(
    lane: _native.Lane, error: torch.Tensor, pulse: threading.Thread, closing: threading.Event, process: int
) -> None:
    lane.close()
    if os.getpid() != process:  # a forked child has no such thread, and may have got its locks as they were
        return
    closing.set()
    pulse.join()
    if int(error[0]) == 0:
        error[0] = CLOSED  # a step that is still under way ends; nobody else would tell it


def spare_cpus(threads: int) -> set[int]:
    """CPUs of the calling thread's mask that a team of so many threads leaves alone; empty where it is given none.

    The rule is csrc/team.cpp's `pinned`: threads get a core each where the process has the machine to itself.
    """
    cores = _native.physical_cores()
    if not hasattr(os, "sched_setaffinity") or len(cores) < 2 or native.granted_threads() < len(cores):
        return set()
    return os.sched_getaffinity(0) - set(cores[:threads])


@contextmanager
def off_cores(threads: int) -> Iterator[None]:
    """Inside, the calling thread keeps off the cores of a team of so many threads."""
    spare = spare_cpus(threads)
    if not spare:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, spare)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _described(bank: ExpertBank) -> tuple[torch.Tensor, int, int, int, int, bool]:
    layout = bank.layout
    return (
        bank.blocks, layout.hidden, layout.intermediate, layout.gate_up.number, layout.down.number, layout.bias
    )  # fmt: skip
