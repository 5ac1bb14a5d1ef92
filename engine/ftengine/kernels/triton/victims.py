"""Between two steps: what was copied in the background enters the table, and the next victims are queued.

Both kernels belong on a stream beside the output head and sampling: after the last layer's `route` and after the
stream of `fetch.admit` has joined, and before the next step's first `route`. Nothing else touches the cache then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import SlotTensors
from ftengine.kernels.triton.cache_state import (
    ADMIT_COPIED,
    ADMIT_COUNT,
    ADMIT_EXPERT,
    ADMIT_MAX,
    ADMIT_SIZE,
    ADMIT_SLOT,
    ADMITTED,
    COUNTERS,
    HEAD,
    PERIOD,
    STEP,
    TICK,
    moved_back,
)
from ftengine.kernels.triton.portable import bound

ROWS, COLUMNS = 32, 256


def end_step(pool: SlotTensors) -> None:
    """After a decode step; capturable."""
    if pool.resident:
        return
    layers, experts = pool.table.shape
    _end_step[(1,)](
        pool.table, pool.keys, pool.score, pool.admit, pool.counters, pool.state, layers, experts,
        EP=triton.next_power_of_2(experts), LP=triton.next_power_of_2(layers), POLICY=pool.policy,
        num_warps=4,
    )  # fmt: skip
    choose_victims(pool)


def choose_victims(pool: SlotTensors) -> None:
    """Queues all slots by rising score, empty ones first, of equals the lower slot; capturable."""
    if pool.resident or not pool.slots:
        return
    _queue_slots[(triton.cdiv(pool.slots, ROWS),)](
        pool.keys, pool.score, pool.queue, pool.queue_score, pool.state, pool.slots,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def window_of(queue, queue_score, stamp, keys, state, slots, W: tl.constexpr):
    """-> the queue's head; of its next W slots: victim, value (score), free (unused in this step), old (key)."""
    head = tl.load(state + HEAD)
    entry = head + tl.arange(0, W)
    inside = entry < slots
    victim = tl.load(queue + entry, inside, -1)
    value = tl.load(queue_score + entry, inside, float("inf"))
    free = inside & (tl.load(stamp + victim, inside, 0) != tl.load(state + STEP))
    return head, victim, value, free, tl.load(keys + victim, inside, -1)


@triton.jit
def _end_step(
    table, keys, score, admit, counters, state, layers, experts,
    EP: tl.constexpr, LP: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    layer = tl.arange(0, LP)
    here = layer < layers
    line = admit + layer * ADMIT_SIZE
    # A list that nobody copied admits nothing.
    admitted = tl.minimum(tl.load(line + ADMIT_COUNT, here, 0), tl.load(line + ADMIT_COPIED, here, 0))
    for entry in tl.static_range(ADMIT_MAX):
        ready = here & (entry < admitted)
        key = layer * experts + tl.load(line + ADMIT_EXPERT + entry, ready, 0)
        slot = tl.load(line + ADMIT_SLOT + entry, ready, 0)
        tl.store(table + key, slot, ready)
        tl.store(keys + slot, key, ready)
    tl.store(line + ADMIT_COUNT, 0, here)
    total = counters + layer * COUNTERS + ADMITTED
    tl.store(total, tl.load(total, here, 0) + admitted.to(tl.int64), here)
    tl.store(state + STEP, tl.load(state + STEP) + 1)
    tick = tl.load(state + TICK) + 1
    if tick == PERIOD:
        tick -= PERIOD
        column = tl.arange(0, EP)
        for row in range(bound(layers)):
            place = score + row * experts + column
            tl.store(place, moved_back(tl.load(place, column < experts, 0.0), POLICY), column < experts)
    tl.store(state + TICK, tick)


@triton.jit
def _queue_slots(keys, score, queue, queue_score, state, slots, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A slot's place is how many come before it: slots^2 comparisons, on all multiprocessors, in one launch."""
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = mine < slots
    value = _value(mine, here, keys, score)
    place = tl.zeros((ROWS,), tl.int32)
    for start in range(0, bound(slots), COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        rival = _value(other, other < slots, keys, score)
        before = (rival[None, :] < value[:, None]) | (
            (rival[None, :] == value[:, None]) & (other[None, :] < mine[:, None])
        )
        place += tl.sum((before & (other < slots)[None, :]).to(tl.int32), 1)
    tl.store(queue + place, mine, here)
    tl.store(queue_score + place, value, here)
    if tl.program_id(0) == 0:
        tl.store(state + HEAD, 0)


@triton.jit
def _value(slot, inside, keys, score):
    key = tl.load(keys + slot, inside, -1)
    return tl.load(score + key, inside & (key >= 0), float("-inf"))
