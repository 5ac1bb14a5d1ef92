"""The next MoE layer's experts, foretold and copied into slots while this layer and the next mixer are computed.

What a layer adds to the residual stream is small beside it, so the next layer's router, applied to this layer's
normalized input, says most of what it will say of its own (speculative loading of experts: Eliseev and Mazur 2023,
arXiv:2312.17238, section 3.2). What it names and no slot holds crosses the link when the link would rest, and is a hit
when its layer comes. A wrong guess costs time on the link and a slot's old content, never a wrong result.

    linear(next_router)            a stream of its own, behind this layer's projection
    choose(..., moe_index + 1)     behind this layer's `route`; the next layer's `route` waits for it
    copy(..., moe_index + 1)       behind that and the copies before, another stream; the next layer's `fetch` waits for
                                   the blocks that `route` wants

`fetch` spins, so what it waits for must be running by then: the next `route`, a program a row and nothing launched
early behind it but a few more, does not end before all programs of `copy` have begun.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import SlotTensors
from ftengine.kernels.triton.cache_state import (
    ARRIVED,
    COPYING,
    COUNTERS,
    HEAD,
    LRU,
    PREFETCH_DONE,
    PREFETCH_EXPERT,
    PREFETCH_LIST,
    PREFETCH_MAX,
    PREFETCH_MOST,
    PREFETCH_RATE,
    PREFETCH_SIZE,
    PREFETCH_SLOT,
    PREFETCH_STARTED,
    PREFETCHED,
    RIGHT,
    STEP,
    TICK,
    clock,
    used,
)
from ftengine.kernels.triton.decide import face
from ftengine.kernels.triton.fetch import PIECE, PREFETCH_PROGRAMS, WARPS, Bank, copy_piece, words
from ftengine.kernels.triton.portable import bound
from ftengine.kernels.triton.topk import most_probable, total_mass
from ftengine.kernels.triton.victims import window_of

WINDOW = 64  # of the queue, where victims are looked for
LEAST_RIGHT = tl.constexpr(0.4)  # of what was listed for a layer lately was used, or prefetching for it rests
AGAIN = tl.constexpr(16)  # and is tried every so many steps
RESTS = tl.constexpr(64)  # one of so many lists is empty: layers without copies are learnt from (learner.py)


def choose(pool: SlotTensors, moe_index: int, logits: torch.Tensor, top_k: int) -> None:
    """Lists what layer `moe_index` will probably miss, its victims given up; capturable.

    logits: float32 [T, E], any row stride: what the router is expected to say of T <= DECODE_TOKENS rows.
    """
    rows, layers, experts = len(logits), *pool.table.shape
    _choose[(rows,)](
        logits, logits.stride(0), pool.table, pool.keys, pool.stamp, pool.score, pool.queue, pool.queue_score,
        pool.prefetch, pool.control, pool.counters, pool.state, pool.row_scratch,
        moe_index, layers, experts, pool.slots, pool.staging, pool.ahead,
        T=rows, K=top_k, KP=triton.next_power_of_2(top_k), EP=triton.next_power_of_2(experts), W=WINDOW,
        POLICY=pool.policy, num_warps=1 if rows == 1 else 4,
    )  # fmt: skip


def copy(pool: SlotTensors, moe_index: int, bank: Bank) -> None:
    """Copies what `choose` listed, the most probable first; capturable. bank: of layer `moe_index`, pinned."""
    _copy[(PREFETCH_PROGRAMS,)](
        words(pool.blocks), words(bank.blocks), pool.prefetch[moe_index], pool.state,
        pool.blocks.shape[1] // 8, bank.blocks.shape[1] // 8, PIECE=PIECE, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["moe_index"])
def _choose(
    logits, logits_stride, table, keys, stamp, score, queue, queue_score, prefetch, control, counters, state, scratch,
    moe_index, layers, experts, slots, staging, ahead,
    T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, EP)
    x = tl.load(logits + program * logits_stride + column, column < experts, float("-inf"))
    ids, _, mass = most_probable(x, experts, K, KP, EP, False)
    wanted = tl.sum((column[:, None] == ids[None, :]).to(tl.int32), 1) > 0
    mass = tl.where(wanted, mass, 0.0)
    tl.store(scratch + program * experts + column, mass, column < experts)
    tl.debug_barrier()
    last = True
    if T > 1:
        last = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel", scope="gpu") == T - 1
    if last:
        if T > 1:
            tl.debug_barrier()
            tl.store(state + ARRIVED, 0)
            mass = total_mass(scratch, experts, T, EP)
            tl.debug_barrier()
            tl.store(scratch + column, mass, column < experts)
            tl.debug_barrier()
        _list(
            mass, scratch, (table, keys, stamp, score, queue, queue_score), prefetch, control, counters, state,
            moe_index, layers, experts, slots, staging, ahead, EP, W, POLICY,
        )  # fmt: skip


@triton.jit
def _list(
    mass, masses, cache, prefetch, control, counters, state, moe_index, layers, experts, slots, staging, ahead,
    EP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """mass: what the rows' routers give the experts that they want, [EP], 0: wanted by none; `masses`: the same in
    memory. The missing ones by falling mass, and victims by rising score, face each other as in `decide`; one that does
    not beat its victim takes a staging slot, as long as there are any. What is still to be copied leaves less room. For
    a layer whose lists were of little use there is one now and then, to see whether that has changed.
    """
    table, keys, stamp, score, queue, queue_score = cache
    column, entry = tl.arange(0, EP), tl.arange(0, PREFETCH_MAX)
    row = moe_index * experts
    expert, chance = _most_wanted(mass, tl.load(table + row + column, column < experts, 0), EP)
    line = prefetch + moe_index * PREFETCH_SIZE
    step, tick = tl.load(state + STEP), tl.load(state + TICK)
    waiting = tl.atomic_add(state + COPYING, 0, sem="relaxed", scope="gpu")
    rate = tl.load(line + PREFETCH_RATE)
    turn = tick + moe_index
    trusted = ((rate < 0) | (rate >= LEAST_RIGHT * RIGHT) | (turn % AGAIN == 0)) & (turn % RESTS != RESTS - 1)
    most = tl.where(trusted, tl.load(control + PREFETCH_MOST) - waiting, 0.0)
    wanted = (chance > 0.0) & (entry < most)

    head, victim, value, free, old = window_of(queue, queue_score, stamp, keys, state, slots, W)
    own = (old >= row) & (old < row + experts)
    needed = own & (tl.load(masses + old - row, own, 0.0) > 0.0)
    free = free & (needed == 0)
    now = clock(tick, moe_index, layers, POLICY)
    if POLICY == LRU:
        fresh = tl.zeros_like(chance) + now
    else:
        fresh = used(tl.load(score + row + expert, wanted, 0.0), chance, now)
    _, _, facing, place, better = face(entry, fresh, victim, value, free, control)
    better = better & wanted
    half = ahead // 2
    # The list ends with the first one that finds no place: what comes after it is less probable.
    listed = tl.cumsum((wanted & (better | (entry < half)) == 0).to(tl.int32), 0) == 0
    better = better & listed
    # Layers take turns with the halves: what the layer before has there is being computed with.
    place = tl.where(better, place, slots + staging - ahead + (moe_index % 2) * half + entry)
    count = tl.sum(listed.to(tl.int32), 0)

    popped = tl.sum((facing & better[:, None]).to(tl.int32), 0) > 0
    tl.store(table + old, -1, popped & (old >= 0))
    tl.store(stamp + victim, step, popped)
    tl.debug_barrier()
    tl.store(table + row + expert, place, better)
    tl.store(keys + place, row + expert, better)
    left = tl.min(tl.where(free & (popped == 0), tl.arange(0, W), W), 0)
    tl.store(state + HEAD, tl.minimum(head + left, slots))
    tl.atomic_add(state + COPYING, count, sem="relaxed", scope="gpu")
    tl.store(line + PREFETCH_LIST, count)
    tl.store(line + PREFETCH_STARTED, 0)
    tl.store(line + PREFETCH_EXPERT + entry, tl.where(listed, expert, -1))
    tl.store(line + PREFETCH_SLOT + entry, place, listed)
    tl.store(line + PREFETCH_DONE + entry, 0)
    total = counters + moe_index * COUNTERS + PREFETCHED
    tl.store(total, tl.load(total) + count)


@triton.jit
def _most_wanted(mass, slot, EP: tl.constexpr):
    """-> expert int32 [PREFETCH_MAX], chance float32 [PREFETCH_MAX]: those without a slot, the largest mass first."""
    column, entry = tl.arange(0, EP), tl.arange(0, PREFETCH_MAX)
    worth = tl.where(slot < 0, mass, 0.0)
    expert, chance = tl.zeros((PREFETCH_MAX,), tl.int32), tl.zeros((PREFETCH_MAX,), tl.float32)
    for place in range(PREFETCH_MAX):
        best = tl.max(worth, 0)
        id = tl.min(tl.where(worth == best, column, EP - 1), 0)
        expert = tl.where(entry == place, id, expert)
        chance = tl.where(entry == place, best, chance)
        worth = tl.where(column == id, 0.0, worth)
    return expert, chance


@triton.jit
def _copy(slots, source, line, state, slot_words, block_words, PIECE: tl.constexpr):
    tl.atomic_add(line + PREFETCH_STARTED, 1, sem="relaxed", scope="gpu")
    pieces = tl.cdiv(block_words, PIECE)
    for entry in range(bound(tl.load(line + PREFETCH_LIST))):
        origin = source + tl.load(line + PREFETCH_EXPERT + entry).to(tl.int64) * block_words
        target = slots + tl.load(line + PREFETCH_SLOT + entry).to(tl.int64) * slot_words
        for piece in range(bound(tl.program_id(0)), bound(pieces), bound(tl.num_programs(0))):
            copy_piece(origin, target, piece, block_words, PIECE)
        tl.debug_barrier()  # every thread has stored its part
        done = tl.atomic_add(line + PREFETCH_DONE + entry, 1, sem="release", scope="gpu")
        if done == tl.num_programs(0) - 1:
            tl.atomic_add(state + COPYING, -1, sem="relaxed", scope="gpu")
