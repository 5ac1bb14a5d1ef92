"""How long layers of decode steps took, from the device's record and the CPU lane's log: no step waits for it.

The record (kernels/triton/join.py) is copied to pinned memory behind a step and looked at some steps later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import numpy.typing
import torch

from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.buffers import SlotTensors

Floats = numpy.typing.NDArray[numpy.float64]
Ints = numpy.typing.NDArray[numpy.int64]

WAITED_US = 0.5  # a shorter wait is the look at an answer that was there


@dataclass(frozen=True)
class LayerTimes:
    """One entry a layer of a step, in microseconds from the beginning of its lookup. [N]

    waited: the GPU did, so `done` is the CPU's time. served: what the CPU's lane itself says of the request; idle: how
    long it had had nothing to do before; NaN where that is not known or nothing was asked for.
    """

    rows: Ints
    misses: Ints
    fetched: Ints
    routes: Ints  # (row, expert) pairs on the CPU
    copy: Floats  # of the fetched experts, over the link
    gpu: Floats  # until the GPU had done its part
    done: Floats  # until the CPU's part was added, too
    served: Floats
    idle: Floats
    awaited: Ints  # prefetched experts that the GPU may have waited for
    step_us: float = numpy.nan  # from one step to the next, the median

    @property
    def on_cpu(self) -> Ints:
        return self.misses - self.fetched

    @property
    def waited(self) -> numpy.typing.NDArray[numpy.bool_]:
        return (self.on_cpu > 0) & (self.done - self.gpu > WAITED_US)

    def __len__(self) -> int:
        return len(self.rows)


def layer_times(record: numpy.typing.NDArray[numpy.int32], log: Ints, after: int) -> LayerTimes:
    """record: int32 [RECORDED, L, RECORD] as the device has it; log: see Lane.log; after: AT_STEP of the last step
    that is known already."""
    new = record[_new_steps(record, after) > 0].astype(numpy.int64)
    new = new[(new[:, at.WHAT.value] >> 8 & 255) < 255]
    what = new[:, at.WHAT.value]
    misses, fetched = what >> 8 & 255, what >> 16 & 255
    asked = new[:, at.ASKED.value]
    if len(log):
        newest = int(log[-1, 0])
        place = numpy.searchsorted(_later(log[:, 0], newest), _later(asked, newest))
        lines = log[numpy.minimum(place, len(log) - 1)]
    else:
        lines = numpy.zeros((len(new), 5), numpy.int64)
    matched = (asked != 0) & (lines[:, 0] == asked)

    def us(column: int) -> Floats:
        return (new[:, column] & 0xFFFFFFFF) / 1e3

    return LayerTimes(
        rows=what & 255,
        misses=misses,
        fetched=fetched,
        routes=numpy.where(matched, lines[:, 2], misses - fetched),
        copy=us(at.COPY.value),
        gpu=us(at.GPU_DONE.value),
        done=us(at.DONE.value),
        served=numpy.where(matched, lines[:, 3] / 1e3, numpy.nan),
        idle=numpy.where(matched, lines[:, 4] / 1e3, numpy.nan),
        awaited=new[:, at.AWAITED.value],
        step_us=_step_us(record),
    )


def _step_us(record: numpy.typing.NDArray[numpy.int32]) -> float:
    """Between the beginnings of steps: the median, so that pauses between requests do not count."""
    first = record[:, 0]
    first = first[first[:, at.AT_STEP.value] != 0]
    if len(first) < 2:
        return float("nan")
    first = first[numpy.argsort(_later(first[:, at.AT_STEP.value], int(first[0, at.AT_STEP.value])))]
    beginnings = first[:, at.AT_TIME.value].astype(numpy.int64)
    return float(numpy.median(numpy.diff(beginnings) & 0xFFFFFFFF)) / 1e3


def _later(numbers: numpy.typing.NDArray[numpy.integer], than: int) -> Ints:
    """How much later each is: numbers of steps and requests are counted modulo 2 ** 32."""
    return (numbers.astype(numpy.int64) - than + 2**31) % 2**32 - 2**31


def _new_steps(record: numpy.typing.NDArray[numpy.int32], after: int) -> Ints:
    """How much later than AT_STEP `after` each entry is, [RECORDED, L]; 0 for those that are not, or empty."""
    steps = record[:, :, at.AT_STEP.value]
    return numpy.where(steps == 0, 0, numpy.maximum(_later(steps, after), 0))


class LayerRecord:
    """The device's record, read without waiting."""

    def __init__(self, pool: SlotTensors) -> None:
        self._record = pool.record
        self._copy = torch.zeros_like(pool.record, device="cpu", pin_memory=pool.record.device.type == "cuda")
        self._event: torch.cuda.Event | None = None
        self._queued = False
        self._known = 0

    def queue(self) -> None:
        """Behind what was launched so far. Does nothing while a copy is under way."""
        if self._queued:
            return
        self._copy.copy_(self._record, non_blocking=True)
        if self._record.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._queued = True

    def take(self, log: Ints) -> LayerTimes | None:
        """What was copied and is new; None while nothing is there. log: of the CPU's lane, at least as new."""
        if not self.ready:
            return None
        self._queued = False
        found = self._copy.numpy()
        times = layer_times(found, log, self._known)
        self._known += int(_new_steps(found, self._known).max())
        return times

    @property
    def ready(self) -> bool:
        return self._queued and (self._event is None or self._event.query())  # type: ignore[no-untyped-call]
