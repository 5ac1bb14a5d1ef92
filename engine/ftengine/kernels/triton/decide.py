"""What the last program of `route` decides for all rows of a layer, as parts of that kernel.

Routes are vectors of R = rows x k, both filled up to powers of two; an expert's first route stands for the expert.
Tuples group what belongs together:

    routes  ids, weights, here (no padding) [R]; same [R, R]: of one expert; first [R]
    shares  how many to fetch of 0, 1, ... missing experts [2 * R]; see split.py
    window  head of the queue; of its next W slots: victim, value (score), free (unused in this step), old (key)
    turns   Chosen's `ready` and `turn`
    cache   table, keys, stamp, score, admit, prefetch, control, counters, state: buffers.SlotTensors
    shape   moe_index, layers, experts, slots, staging
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.cache_state import (
    ADMIT_COPIED,
    ADMIT_COUNT,
    ADMIT_EXPERT,
    ADMIT_MAX,
    ADMIT_SIZE,
    ADMIT_SLOT,
    BEGAN,
    BUDGET,
    COUNTERS,
    CPU_EXPERTS,
    CPU_ROUTES,
    FETCHED,
    FORETOLD,
    GATE,
    HEAD,
    HITS,
    KEPT,
    LAYER,
    LRU,
    MISSES,
    PENDING,
    PREFETCH_AWAITED,
    PREFETCH_EXPERT,
    PREFETCH_LIST,
    PREFETCH_MAX,
    PREFETCH_RATE,
    PREFETCH_SIZE,
    PREFETCH_SLOT,
    PREFETCH_STARTED,
    REQUEST,
    RIGHT,
    STEPS,
    clock,
    used,
)
from ftengine.kernels.triton.split import share_of
from ftengine.kernels.triton.system import store_release, wait_for_count


@triton.jit
def distinct(ids, T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """ids [R] -> here, same, first."""
    number = tl.arange(0, R)
    here = ((number // KP) < T) & ((number % KP) < K)
    same = (ids[:, None] == ids[None, :]) & here[:, None] & here[None, :]
    earlier = number[None, :] < number[:, None]
    return here, same, here & (tl.sum((same & earlier).to(tl.int32), 1) == 0)


@triton.jit
def choose(slot, weights, same, first, mine, chosen, T: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """Writes Chosen: of the routes `mine` one row an expert, in the order of their first routes."""
    count, slots, combine, stride = chosen
    number = tl.arange(0, R)
    own = (first & mine).to(tl.int32)
    line = tl.cumsum(own, 0) - 1
    tl.store(count, tl.sum(own, 0))
    tl.store(slots + line, slot, first & mine)
    if T > 1:
        for token in tl.static_range(T):
            tl.store(combine + line * stride + token, 0.0, first & mine)
        tl.debug_barrier()
        line = tl.sum(tl.where(same & (own[None, :] > 0), line[None, :], 0), 1)
    tl.store(combine + line * stride + number // KP, weights, mine)


@triton.jit
def _take_turns(ready, arriving, turns):
    """Writes Chosen's `ready` and `turn`. ready, arriving: the first routes of experts of either kind."""
    count, turn = turns
    here, all_ready = ready | arriving, tl.sum(ready.to(tl.int32), 0)
    line = tl.cumsum(here.to(tl.int32), 0) - 1
    before = tl.cumsum(ready.to(tl.int32), 0)  # of those that are ready, up to this one
    tl.store(count, all_ready)
    tl.store(turn + tl.where(ready, before - 1, all_ready + line - before), line, here)


@triton.jit
def decide(
    routes, mass, shares, window, time, chosen, turns, fetch, cache, box, shape,
    T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, EP: tl.constexpr, W: tl.constexpr,
    POLICY: tl.constexpr, CPU: tl.constexpr, FETCH: tl.constexpr, PREFETCH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    ids, weights, here, same, first = routes
    table, keys, stamp, score, admit, prefetch, control, counters, state = cache
    moe_index, layers, experts, slots, staging = shape
    head, victim, value, free, old = window
    step, tick, began = time
    row = moe_index * experts
    slot = tl.load(table + row + ids, here, -1)
    # What was prefetched for this layer: its blocks may still be under way, up to an entry of the list.
    late, foretold, awaited = here & False, 0, 0
    if PREFETCH > 0:
        late, slot, foretold, awaited = _foretold(ids, here, first, slot, prefetch + moe_index * PREFETCH_SIZE)
    hit, miss = here & (slot >= 0), here & (slot < 0)
    tl.store(stamp + slot, step, hit & (slot < slots))
    worth, fresh = _rescore(ids, here, mass, score + row, clock(tick, moe_index, layers, POLICY), experts, EP, POLICY)

    # The missing experts by falling worth, and the victims that are left by rising score, face each other.
    taken = (victim[:, None] == slot[None, :]) & hit[None, :]
    free = free & (tl.sum(taken.to(tl.int32), 1) == 0)
    before = (worth[None, :] > worth[:, None]) | ((worth[None, :] == worth[:, None]) & (ids[None, :] < ids[:, None]))
    rank = tl.sum((before & (first & miss)[None, :]).to(tl.int32), 1)
    order, victims, _, place, better = face(rank, fresh, victim, value, free, control)

    misses = tl.sum((first & miss).to(tl.int32), 0)
    fetched, kept, admitted = _split(
        misses, first & miss, rank, better, victims, tick + moe_index, shares, control, staging, R, CPU, FETCH
    )
    arriving = miss & (rank < fetched)
    keep = arriving & (rank < kept)
    if CPU and FETCH:
        background = first & miss & (rank >= fetched) & (rank < fetched + admitted)
        listed = admit + moe_index * ADMIT_SIZE
        tl.store(listed + ADMIT_COUNT, admitted)
        tl.store(listed + ADMIT_COPIED, 0)
        tl.store(listed + ADMIT_EXPERT + rank - fetched, ids, background)
        tl.store(listed + ADMIT_SLOT + rank - fetched, place, background)
    popped = free & (order < kept + admitted)
    tl.store(table + old, -1, popped & (old >= 0))
    tl.store(stamp + victim, step, popped)
    tl.store(keys + victim, -1, popped)
    tl.debug_barrier()
    tl.store(table + row + ids, place, first & keep)
    tl.store(keys + place, row + ids, first & keep)
    left = tl.min(tl.where(free & (order >= kept + admitted), tl.arange(0, W), W), 0)
    tl.store(state + HEAD, tl.minimum(head + left, slots))

    slot = tl.where(hit, slot, tl.where(keep, place, slots + rank - kept))
    fetch_count, fetch_expert, fetch_slot = fetch
    tl.store(fetch_count, fetched)
    tl.store(fetch_expert + rank, ids, first & arriving)
    tl.store(fetch_slot + rank, slot, first & arriving)
    on_cpu = miss & (rank >= fetched)
    pairs = tl.sum(on_cpu.to(tl.int32), 0)
    if CPU:  # which begins while the rest is written
        _publish(ids, weights, here, on_cpu, pairs, box, state, moe_index, T, K, KP, R, INTERPRETED)
    choose(slot, weights, same, first, hit | arriving, chosen, T, KP, R)
    _take_turns(first & hit & (late == 0), first & (arriving | late), turns)
    hits = tl.sum((first & hit).to(tl.int32), 0)
    _count(counters + moe_index * COUNTERS, hits, misses, fetched, kept, pairs, foretold)
    if CPU:
        counts = (tl.minimum(misses, 255) << 8) | (tl.minimum(fetched, 255) << 16) | (tl.minimum(hits, 255) << 24)
        tl.store(state + LAYER, T | counts)
        tl.store(state + BEGAN, began)
    if PREFETCH > 0 and not INTERPRETED:  # noqa: SIM102 (one is known when the kernel is compiled)
        if awaited > 0:
            wait_for_count(prefetch + moe_index * PREFETCH_SIZE + PREFETCH_STARTED, PREFETCH)


@triton.jit
def _foretold(ids, here, first, slot, line):
    """Which routes [R] are of experts that were prefetched for this layer, all slots [R], how many experts those are,
    and how many entries of the list, up to the last one of them. Writes the latter, and how good the list was."""
    entry = tl.arange(0, PREFETCH_MAX)
    listed = tl.load(line + PREFETCH_EXPERT + entry)
    place = tl.load(line + PREFETCH_SLOT + entry)
    count, rate = tl.load(line + PREFETCH_LIST), tl.load(line + PREFETCH_RATE)
    same = (ids[:, None] == listed[None, :]) & here[:, None]
    late = tl.sum(same.to(tl.int32), 1) > 0
    slot = tl.where(late, tl.sum(tl.where(same, place[None, :], 0), 1), slot)
    wanted = tl.sum(same.to(tl.int32), 0) > 0
    awaited = tl.max(tl.where(wanted, entry + 1, 0), 0)
    tl.store(line + PREFETCH_AWAITED, awaited)
    used = tl.sum(wanted.to(tl.int32), 0)
    if count > 0:
        tl.store(line + PREFETCH_RATE, followed(rate, used, count))
    return late, slot, used, awaited


@triton.jit
def followed(rate, used, count):
    """PREFETCH_RATE after `used` of `count` listed experts were."""
    before = tl.where(rate < 0, RIGHT, rate)
    return before + (used * RIGHT // count - before) // 16


@triton.jit
def face(rank, fresh, victim, value, free, control):
    """Experts of the scores `fresh`, by rank 0, 1, ..., and those of the window's victims that are free, in order.

    -> order [W] of the free victims and how many there are; facing [R, W], who faces whom; of each expert, the slot of
    its victim and whether it is worth more than that.
    """
    order = tl.cumsum(free.to(tl.int32), 0) - 1
    victims = tl.sum(free.to(tl.int32), 0)
    facing = free[None, :] & (order[None, :] == rank[:, None])
    place = tl.sum(tl.where(facing, victim[None, :], 0), 1)
    rival = tl.max(tl.where(facing, value[None, :], float("-inf")), 1)
    rival = tl.where(tl.load(control + GATE) != 0.0, rival, float("-inf"))
    return order, victims, facing, place, (rank < victims) & (fresh > rival)


@triton.jit
def _rescore(ids, here, mass, score_row, now, experts, EP: tl.constexpr, POLICY: tl.constexpr):
    """Scores this step's use -> worth [R], by which missing experts are ordered, and fresh [R], the new scores."""
    if POLICY == LRU:
        worth = tl.load(score_row + ids, here, float("-inf"))
        tl.debug_barrier()
        tl.store(score_row + ids, now, here)
        return worth, tl.zeros_like(worth) + now
    else:
        column = tl.arange(0, EP)
        inside = column < experts
        tl.store(score_row + column, used(tl.load(score_row + column, inside, 0.0), mass, now), inside)
        tl.debug_barrier()
        worth = tl.load(score_row + ids, here, float("-inf"))
        return worth, worth


@triton.jit
def _split(
    misses, missing, rank, better, victims, turn, shares, control, staging,
    R: tl.constexpr, CPU: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """How many of the missing experts, by rank, are fetched; of them kept in slots; and after them copied behind.

    What is fetched and not kept needs a staging slot. The background takes victims only after the fetched ones all
    found one that they beat.
    """
    if not FETCH:
        none = misses * 0
        return none, none, none
    fetched = misses
    if CPU:
        fetched = share_of(shares, misses, 2 * R)
    kept = tl.sum((missing & (rank < fetched) & better).to(tl.int32), 0)
    kept = tl.minimum(victims, tl.maximum(kept, fetched - staging))
    fetched = tl.minimum(fetched, kept + staging)
    admitted = misses * 0
    if CPU:
        budget = tl.load(control + BUDGET)
        start = turn.to(tl.float32)
        allowed = (tl.floor((start + 1.0) * budget) - tl.floor(start * budget)).to(tl.int32)
        allowed = tl.where(kept == fetched, tl.minimum(tl.maximum(allowed, 0), ADMIT_MAX), 0)
        wanted = missing & (rank >= fetched) & (rank < fetched + allowed) & better
        admitted = tl.sum(wanted.to(tl.int32), 0)
    return fetched, kept, admitted


@triton.jit
def _publish(
    ids, weights, here, on_cpu, pairs, box, state, moe_index,
    T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Hands the CPU its routes; the rows are in the mailbox already."""
    bell, box_ids, box_weights = box
    tl.store(state + PENDING, tl.where(pairs > 0, T, 0))
    if pairs > 0:
        request = tl.load(state + REQUEST) + 1
        number = tl.arange(0, R)
        at = (number // KP) * K + number % KP
        tl.store(box_ids + at, tl.where(on_cpu, ids, -1), here)
        tl.store(box_weights + at, weights, here)
        tl.store(bell + 1, moe_index)
        tl.store(bell + 2, T)
        tl.store(bell + 3, K)
        tl.store(state + REQUEST, request)
        store_release(bell, request, INTERPRETED)


@triton.jit
def _count(line, hits, misses, fetched, kept, pairs, foretold):
    column = tl.arange(0, COUNTERS)
    more = tl.where(column == HITS, hits, 0) + tl.where(column == MISSES, misses, 0)
    more += tl.where(column == FETCHED, fetched, 0) + tl.where(column == KEPT, kept, 0)
    more += tl.where(column == CPU_EXPERTS, misses - fetched, 0) + tl.where(column == CPU_ROUTES, pairs, 0)
    more += tl.where(column == STEPS, 1, 0) + tl.where(column == FORETOLD, foretold, 0)
    tl.store(line + column, tl.load(line + column) + more.to(tl.int64))
