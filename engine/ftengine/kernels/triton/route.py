"""A layer's routing in a decode step: who is needed, what lies in slots, what is fetched, what the CPU computes.

One program a row finds its top-k and copies its hidden state to the mailbox. The last one to come decides for all
rows together, so a layer costs one launch: it looks distinct experts up, splits the missing ones between the link and
the CPU, takes victims from the queue, writes Chosen and the fetch list, and rings the CPU's bell. Each of (token,
expert) goes to exactly one of the two.

Runs in the step's stream: nothing but `fetch.admit` of earlier layers and `prefetch.copy` may run beside it. The
table's entries of experts that are copied in the background change in `end_step`; a slot that anything in this step
used or took is stamped with the step's number and no victim until the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import DECODE_TOKENS, Mailbox, RouteBuffers, SlotTensors
from ftengine.kernels.triton.cache_state import ARRIVED, LRU, STEP, TICK, TRACE, TRACED, TRIES
from ftengine.kernels.triton.decide import choose, decide, distinct
from ftengine.kernels.triton.fetch import PREFETCH_PROGRAMS
from ftengine.kernels.triton.launch import INTERPRETED, PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound
from ftengine.kernels.triton.split import shares_of
from ftengine.kernels.triton.system import nanoseconds
from ftengine.kernels.triton.topk import most_probable, total_mass
from ftengine.kernels.triton.victims import window_of


def route(
    pool: SlotTensors,
    moe_index: int,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    top_k: int,
    normalize: bool,
    buffers: RouteBuffers,
    mailbox: Mailbox | None,
    *,
    prefetched: bool = False,
) -> None:
    """Routes T <= DECODE_TOKENS rows of MoE layer `moe_index`; capturable, no host synchronization.

    logits: float32 [T, E] or [T, E + 1] with a shared expert's gate last, any row stride. hidden: [T, H] activations,
    contiguous rows; the CPU's copy. buffers and mailbox: of at least T rows and of `top_k` routes a row. prefetched:
    prefetch.py chose experts of this layer before.
    Without a mailbox, or where the GPU cannot read host memory, all misses go the one way that is left. Raises
    ValueError where there is none, or more rows than the kernels take.
    """
    rows, columns = logits.shape
    layers, experts = pool.table.shape
    _check(pool, rows, top_k, mailbox)
    rows_padded, k_padded = triton.next_power_of_2(rows), triton.next_power_of_2(top_k)
    routes = rows_padded * k_padded
    ring = pool.trace
    box = mailbox or Mailbox(*[pool.state] * 7)  # never touched without CPU
    width = hidden.shape[1]
    _route[(rows,)](
        logits, logits.stride(0), hidden, hidden.stride(0), width,
        buffers.ids, buffers.weights, buffers.gates, buffers.chosen.count, buffers.chosen.slot,
        buffers.chosen.combine, buffers.chosen.combine.stride(0), buffers.chosen.ready, buffers.chosen.turn,
        buffers.fetch.count, buffers.fetch.expert, buffers.fetch.slot,
        pool.table, pool.keys, pool.stamp, pool.score, pool.queue, pool.queue_score, pool.admit, pool.prefetch,
        pool.control, pool.counters, pool.state, pool.row_scratch, pool.split, pool.split.shape[2],
        box.bell, box.ids, box.weights, box.rows,
        ring.ids if ring else pool.state, ring.logits if ring else pool.state, len(ring.ids) if ring else 1,
        moe_index, layers, experts, pool.slots, pool.staging - pool.ahead,
        T=rows, TP=rows_padded, K=top_k, KP=k_padded, EP=triton.next_power_of_2(experts),
        HP=min(2048, triton.next_power_of_2(width)), W=max(32, 2 * routes),
        GATED=columns > experts, NORMALIZE=normalize, POLICY=pool.policy, RESIDENT=pool.resident,
        CPU=mailbox is not None and not pool.resident, FETCH=pool.readable, RECORD=ring is not None,
        PREFETCH=PREFETCH_PROGRAMS if prefetched else 0, TOKENS=DECODE_TOKENS, INTERPRETED=INTERPRETED, PDL=PDL,
        num_warps=_warps(routes), **launch_options(),
    )  # fmt: skip


def _warps(routes: int) -> int:
    """A warp needs no shared memory to agree; more rows bring [routes, routes] comparisons."""
    return 1 if routes <= 8 else min(8, triton.cdiv(routes, 16) * 2)


def _check(pool: SlotTensors, rows: int, top_k: int, mailbox: Mailbox | None) -> None:
    if not 1 <= rows <= DECODE_TOKENS:
        raise ValueError(f"route takes 1 to {DECODE_TOKENS} rows, not {rows}")
    if pool.resident or mailbox is not None:
        return
    needed = min(rows * top_k, pool.table.shape[1])
    staging = pool.staging - pool.ahead
    if not pool.readable or staging < needed:
        raise ValueError(
            f"without the CPU, {rows} rows of {top_k} experts need {needed} staging slots and pinned experts; "
            f"there are {staging}{'' if pool.readable else ', not pinned'}"
        )


@triton.jit(do_not_specialize=["moe_index", "ring_steps"])
def _route(
    logits, logits_stride, hidden, hidden_stride, width,
    ids_out, weights_out, gates_out, chosen_count, chosen_slot, combine, combine_stride, ready, turn,
    fetch_count, fetch_expert, fetch_slot,
    table, keys, stamp, score, queue, queue_score, admit, prefetch, control, counters, state, scratch,
    split, most,
    bell, box_ids, box_weights, box_rows,
    ring_ids, ring_logits, ring_steps,
    moe_index, layers, experts, slots, staging,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, HP: tl.constexpr,
    W: tl.constexpr, GATED: tl.constexpr, NORMALIZE: tl.constexpr, POLICY: tl.constexpr, RESIDENT: tl.constexpr,
    CPU: tl.constexpr, FETCH: tl.constexpr, RECORD: tl.constexpr, PREFETCH: tl.constexpr, TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = TP * KP
    row = tl.program_id(0)
    column, place = tl.arange(0, EP), tl.arange(0, KP)
    wait_for_previous(PDL)
    start_next(PDL)
    began = 0
    if CPU:
        began = nanoseconds(INTERPRETED).to(tl.int32)
    # What is needed besides the ids is asked for now and comes while the top-k is found.
    if RECORD:
        recording = tl.load(control + TRACE)
    x = tl.load(logits + row * logits_stride + column, column < experts, float("-inf"))
    if CPU:
        _copy_row(hidden + row * hidden_stride, box_rows + row * width, width, HP)
    if not RESIDENT:
        step, tick = tl.load(state + STEP), tl.load(state + TICK)
        window = window_of(queue, queue_score, stamp, keys, state, slots, W)
        shares = step
        if CPU and FETCH:
            shares = shares_of(split, most, tl.load(control + TRIES), tick * layers + moe_index, TOKENS, T, 2 * R)
    ids, weights, mass = most_probable(x, experts, K, KP, EP, NORMALIZE)
    tl.store(ids_out + row * K + place, ids, place < K)
    tl.store(weights_out + row * K + place, weights, place < K)
    if GATED:
        tl.store(gates_out + row, tl.sigmoid(tl.load(logits + row * logits_stride + experts)))
    else:
        tl.store(gates_out + row, 1.0)
    if RECORD:  # noqa: SIM102 (one is known when the kernel is compiled)
        if (row == 0) & (recording != 0.0):
            _record(ids, x, state, ring_ids, ring_logits, ring_steps, moe_index, layers, experts, K, KP, EP)
    last = True
    if T > 1:
        if not RESIDENT and POLICY != LRU:
            tl.store(scratch + row * experts + column, mass, column < experts)
        tl.debug_barrier()
        last = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel", scope="gpu") == T - 1
    if last:
        if T > 1:
            tl.debug_barrier()
            tl.store(state + ARRIVED, 0)
            all_ids, all_weights = _of_all_rows(ids_out, weights_out, T, K, KP, R)
            if not RESIDENT and POLICY != LRU:
                mass = total_mass(scratch, experts, T, EP)
        else:
            all_ids, all_weights = ids, weights
        here, same, first = distinct(all_ids, T, K, KP, R)
        chosen = (chosen_count, chosen_slot, combine, combine_stride)
        if RESIDENT:
            choose(moe_index * experts + all_ids, all_weights, same, first, here, chosen, T, KP, R)
        else:
            decide(
                (all_ids, all_weights, here, same, first), mass, shares, window, (step, tick, began), chosen,
                (ready, turn), (fetch_count, fetch_expert, fetch_slot),
                (table, keys, stamp, score, admit, prefetch, control, counters, state),
                (bell, box_ids, box_weights), (moe_index, layers, experts, slots, staging),
                T, K, KP, R, EP, W, POLICY, CPU, FETCH, PREFETCH, INTERPRETED,
            )  # fmt: skip


@triton.jit
def _of_all_rows(ids, weights, T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """What the rows' programs have written, as vectors [R]."""
    row, place = tl.arange(0, R) // KP, tl.arange(0, R) % KP
    inside = (row < T) & (place < K)
    return tl.load(ids + row * K + place, inside, -1), tl.load(weights + row * K + place, inside, 0.0)


@triton.jit
def _record(
    ids, x, state, ring_ids, ring_logits, ring_steps, moe_index, layers, experts,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """What the router said of a row, for the layer's line of the ring; the last layer ends the step's."""
    column, place = tl.arange(0, EP), tl.arange(0, KP)
    done = tl.load(state + TRACED)
    line = (done % ring_steps).to(tl.int64) * layers + moe_index
    tl.store(ring_ids + line * K + place, ids.to(tl.int16), place < K)
    tl.store(ring_logits + line * experts + column, x.to(tl.float16), column < experts)
    if moe_index == layers - 1:
        tl.debug_barrier()  # every thread knows its line
        tl.store(state + TRACED, done + 1)


@triton.jit
def _copy_row(source, target, width, HP: tl.constexpr):
    for start in range(0, bound(width), HP):
        column = start + tl.arange(0, HP)
        tl.store(target + column, tl.load(source + column, column < width), column < width)
