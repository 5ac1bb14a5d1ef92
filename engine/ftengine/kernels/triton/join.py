"""Waits for the CPU's part of a layer and adds it.

The one kernel that may spin: in the step's stream after the GPU's experts, so that both lanes have run side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import Mailbox, SlotTensors
from ftengine.kernels.triton.cache_state import (
    ASKED,
    AT_STEP,
    AT_TIME,
    AWAITED,
    BEGAN,
    COPY,
    COUNTERS,
    DONE,
    GPU_DONE,
    LAST_COPY,
    LAYER,
    PENDING,
    PREFETCH_AWAITED,
    PREFETCH_SIZE,
    RECORD,
    RECORDED,
    REQUEST,
    STEP,
    WAITED,
    WHAT,
)
from ftengine.kernels.triton.launch import INTERPRETED, PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.system import PULSES, STOPPED, load_acquire, nanoseconds, passed

POLLS = 2_000_000  # instead of time, in the interpreter: some 20 s
BLOCK = 2048
# Looks at the reply to one at mailbox.error: each goes over the bus and takes a microsecond
POLLS_A_CHECK, POLLS_A_PULSE = tl.constexpr(64), tl.constexpr(4096)
LATE = tl.constexpr(1)  # mailbox.error: the CPU did not answer


def join(
    pool: SlotTensors, moe_index: int, mailbox: Mailbox, out: torch.Tensor, other: torch.Tensor | None = None
) -> None:
    """out float32 [T, H] += the CPU's rows where `route` rang for this layer; capturable.

    Waits for PULSES of the CPU at most (experts/lane.py), and no longer than STOPPED for a CPU that gives none; then it
    sets mailbox.error to LATE and adds nothing. Nor does it wait on where that is set. other: float32 [T, H],
    contiguous, is added before the wait.
    """
    rows, width = out.shape
    _join[(rows, triton.cdiv(width, BLOCK))](
        pool.state, pool.counters, pool.record, pool.prefetch,
        mailbox.reply, mailbox.error, mailbox.out, out, out.stride(0), out if other is None else other, width,
        moe_index, len(pool.table),
        OTHER=other is not None, PATIENCE=POLLS if INTERPRETED else STOPPED.value, BLOCK=BLOCK, INTERPRETED=INTERPRETED,
        PDL=PDL, num_warps=4, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["moe_index", "layers"])
def _join(
    state, counters, record, prefetch, reply, error, added, out, stride, other, width, moe_index, layers,
    OTHER: tl.constexpr, PATIENCE: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    records = (row == 0) & (tl.program_id(1) == 0)
    pending = tl.load(state + PENDING)
    request = tl.load(state + REQUEST)
    start = nanoseconds(INTERPRETED)
    end = start
    if OTHER:
        both = tl.load(out + row * stride + column, inside, 0.0) + tl.load(other + row * width + column, inside, 0.0)
        tl.store(out + row * stride + column, both, inside)
    if pending > row:
        before = tl.load(out + row * stride + column, inside, 0.0)
        spent, counted = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        answered = load_acquire(reply, INTERPRETED) == request
        failed = answered & False
        given_up = failed
        polls = 0
        first = request
        while (answered == 0) & (failed == 0) & (given_up == 0) & (counted < PATIENCE):
            answered = load_acquire(reply, INTERPRETED) == request
            polls += 1
            if polls % POLLS_A_CHECK == 0:
                failed = load_acquire(error, INTERPRETED) != 0
            if polls % POLLS_A_PULSE == 0:
                pulse = load_acquire(error + 1, INTERPRETED)
                first = tl.where(polls == POLLS_A_PULSE, pulse, first)
                given_up = pulse - first >= PULSES
            if INTERPRETED:
                spent += 1
                counted += 1
            else:
                now = nanoseconds(INTERPRETED) - start
                counted += passed(spent, now)
                spent = now
        if answered:
            more = tl.load(added + row * width + column, inside, 0.0)
            tl.store(out + row * stride + column, before + more, inside)
        elif failed == 0:
            tl.store(error, LATE)
        if records:
            line = counters + moe_index * COUNTERS + WAITED
            tl.store(line, tl.load(line) + counted)
        end = start + spent
    if records:
        _record(state, counters, record, prefetch, tl.where(pending > 0, request, 0), start, end, moe_index, layers)


@triton.jit
def _record(state, counters, record, prefetch, request, start, end, moe_index, layers):
    """start, end: when the GPU, and both lanes, had done the layer, ns."""
    column = tl.arange(0, RECORD)
    step, began = tl.load(state + STEP), tl.load(state + BEGAN)
    line = tl.where(column == WHAT, tl.load(state + LAYER), 0) + tl.where(column == ASKED, request, 0)
    copied = tl.load(counters + moe_index * COUNTERS + LAST_COPY).to(tl.int32)
    line += tl.where(column == COPY, copied, 0) + tl.where(column == AT_TIME, began, 0)
    line += tl.where(column == GPU_DONE, start.to(tl.int32) - began, 0)
    line += tl.where(column == DONE, end.to(tl.int32) - began, 0) + tl.where(column == AT_STEP, step + 1, 0)
    awaited = tl.load(prefetch + moe_index * PREFETCH_SIZE + PREFETCH_AWAITED)
    line += tl.where(column == AWAITED, tl.maximum(awaited, 0), 0)
    tl.store(record + ((step & (RECORDED - 1)) * layers + moe_index) * RECORD + column, line)
