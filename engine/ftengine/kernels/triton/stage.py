"""Routing and experts' blocks for prefill: any number of rows, every expert that is used and in no slot copied once.

A chunk goes through a layer in rounds. Resident experts are used where they lie, in round 0; the others come in
batches of half the staging slots, odd and even rounds in different halves, so that one round's blocks are copied
while the one before is computed:

    routes = route_prefill(...)                       compute stream
    for round in range(routes.rounds):
        stage(..., round)                             copy stream: after route_prefill, and after round - 2 is seeded
        slots = slots_for_round(routes, round)        compute stream: after stage(round)
        ... experts over `slots` ...
        seed(..., round)                              compute stream: takes what is worth keeping into slots

`seed` gives up slots that round 0 may have read, so it stays behind the experts in their stream. No decode step may
run meanwhile. The number of rounds is an upper bound, known without asking the device; a round without experts costs
its launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import FetchList, SlotTensors
from ftengine.kernels.triton.cache_state import COUNTERS, HALF_LIFE, LRU, SEEDED, STAGED, STEADY, TICK, clock, used
from ftengine.kernels.triton.fetch import Bank, copy_blocks, copy_within
from ftengine.kernels.triton.topk import most_probable
from ftengine.kernels.triton.victims import choose_victims

MOST_AGED = 4.0  # half-lives that a prompt, however long, ages what was there before


@dataclass(frozen=True)
class PrefillRoutes:
    """Of one layer and chunk, on the device. `half`: experts a round."""

    ids: torch.Tensor  # int32 [T, K], most probable first
    weights: torch.Tensor  # float32 [T, K]
    gates: torch.Tensor  # float32 [T], of the shared expert; 1 where it has none
    counts: torch.Tensor  # int32 [E], routes an expert
    place: torch.Tensor  # int32 [E]: the slot where a used expert lies or will lie
    turn: torch.Tensor  # int32 [E]: the round in which it lies there, -1: not used
    missing: FetchList  # count int32 [rounds]; round r's are at [r * half, (r + 1) * half)
    rounds: int
    half: int
    moe_index: int


def route_prefill(
    pool: SlotTensors, moe_index: int, logits: torch.Tensor, top_k: int, normalize: bool
) -> PrefillRoutes:
    """Routes T rows of MoE layer `moe_index` and plans its rounds; no host synchronization.

    logits: float32 [T, E] or [T, E + 1] with a shared expert's gate last, any row stride. The experts' scores count
    the chunk as the steady state of its own frequencies. Raises ValueError where there is nowhere to stage.
    """
    rows, columns = logits.shape
    layers, experts = pool.table.shape
    half = experts if pool.resident else pool.staging // 2
    if half < 1:
        raise ValueError(f"prefill needs 2 or more staging slots, there are {pool.staging}")
    rounds = 1 if pool.resident else triton.cdiv(min(experts, rows * top_k), half)
    most_rounds = triton.cdiv(experts, half)  # one kernel for prompts of all lengths

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    routes = PrefillRoutes(
        ids=ints(rows, top_k),
        weights=torch.empty(rows, top_k, device=logits.device),
        gates=torch.empty(rows, device=logits.device),
        counts=torch.zeros(experts, dtype=torch.int32, device=logits.device),
        place=ints(experts),
        turn=ints(experts),
        missing=FetchList(ints(rounds), ints(experts), ints(experts)),
        rounds=rounds,
        half=half,
        moe_index=moe_index,
    )
    padded = triton.next_power_of_2(experts)
    _route_rows[(rows,)](
        logits, logits.stride(0), routes.ids, routes.weights, routes.gates, routes.counts, experts,
        K=top_k, KP=triton.next_power_of_2(top_k), EP=padded, GATED=columns > experts, NORMALIZE=normalize, num_warps=1,
    )  # fmt: skip
    _plan[(1,)](
        routes.counts, pool.table, pool.score, pool.counters, pool.state, routes.place, routes.turn,
        routes.missing.count, routes.missing.expert, routes.missing.slot, moe_index, layers, experts, pool.slots,
        half, rounds, 1.0 / (rows * top_k), min(rows / HALF_LIFE.value, MOST_AGED),
        EP=padded, RP=triton.next_power_of_2(most_rounds), POLICY=pool.policy, RESIDENT=pool.resident, num_warps=4,
    )  # fmt: skip
    return routes


def stage(pool: SlotTensors, bank: Bank, routes: PrefillRoutes, round: int) -> None:
    """Copies a round's missing experts into its half of the staging slots.

    Where the GPU cannot read host memory the host copies, and waits for the device to learn what.
    """
    if pool.resident:
        return
    count, expert, slot = (part[start:] for part, start in _parts(routes, round))
    if pool.readable:
        copy_blocks(pool, bank, FetchList(count, expert, slot), routes.moe_index)
        return
    listed = int(count[0])
    for source, target in zip(expert[:listed].tolist(), slot[:listed].tolist(), strict=True):
        pool.blocks[target, : bank.blocks.shape[1]].copy_(bank.blocks[source])


def slots_for_round(routes: PrefillRoutes, round: int) -> torch.Tensor:
    """int32 [T, K]: the slot of each route that is computed in this round, else -1."""
    slots = torch.empty_like(routes.ids)
    size = slots.numel()
    _slots_for_round[(triton.cdiv(size, 1024),)](
        routes.ids, routes.place, routes.turn, slots, round, size, BLOCK=1024, num_warps=4
    )
    return slots


def seed(pool: SlotTensors, moe_index: int, routes: PrefillRoutes, round: int) -> None:
    """Copies staged experts of a round into slots: empty ones first, then where their score beats the victim's."""
    if pool.resident or not pool.slots:
        return
    choose_victims(pool)
    layers, experts = pool.table.shape
    kept = FetchList(
        *(torch.empty(size, dtype=torch.int32, device=pool.table.device) for size in (1, experts, experts))
    )
    count, expert, slot = (part[start:] for part, start in _parts(routes, round))
    _seed[(1,)](
        count, expert, slot, pool.table, pool.keys, pool.score, pool.queue, pool.queue_score, pool.counters,
        kept.count, kept.expert, kept.slot, moe_index, experts, pool.slots, 2 * triton.cdiv(pool.slots, layers),
        HALF=triton.next_power_of_2(routes.half), num_warps=8,
    )  # fmt: skip
    copy_within(pool, kept)


def _parts(routes: PrefillRoutes, round: int) -> list[tuple[torch.Tensor, int]]:
    first = round * routes.half
    return [(routes.missing.count, round), (routes.missing.expert, first), (routes.missing.slot, first)]


@triton.jit
def _route_rows(
    logits, stride, ids_out, weights_out, gates_out, counts, experts,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, GATED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, place = tl.arange(0, EP), tl.arange(0, KP)
    x = tl.load(logits + row * stride + column, column < experts, float("-inf"))
    ids, weights, _ = most_probable(x, experts, K, KP, EP, NORMALIZE)
    tl.store(ids_out + row * K + place, ids, place < K)
    tl.store(weights_out + row * K + place, weights, place < K)
    tl.atomic_add(counts + ids, 1, mask=place < K, sem="relaxed")
    if GATED:
        tl.store(gates_out + row, tl.sigmoid(tl.load(logits + row * stride + experts)))
    else:
        tl.store(gates_out + row, 1.0)


@triton.jit(do_not_specialize=["moe_index", "half", "rounds"])
def _plan(
    counts, table, score, counters, state, place_out, turn_out, round_count, expert_out, slot_out,
    moe_index, layers, experts, slots, half, rounds, per_route, ages,
    EP: tl.constexpr, RP: tl.constexpr, POLICY: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, EP)
    inside = column < experts
    count = tl.load(counts + column, inside, 0)
    needed = count > 0
    row = moe_index * experts
    if RESIDENT:
        tl.store(place_out + column, row + column, inside)
        tl.store(turn_out + column, tl.where(needed, 0, -1), inside)
    else:
        slot = tl.load(table + row + column, inside, -1)
        missing = needed & (slot < 0)
        number = tl.cumsum(missing.to(tl.int32), 0) - 1
        turn = number // half
        staged = slots + (turn % 2) * half + number % half
        tl.store(place_out + column, tl.where(missing, staged, slot), inside)
        tl.store(turn_out + column, tl.where(missing, turn, tl.where(needed, 0, -1)), inside)
        tl.store(expert_out + number, column, missing)
        tl.store(slot_out + number, staged, missing)
        total = tl.sum(missing.to(tl.int32), 0)
        round = tl.arange(0, RP)
        tl.store(round_count + round, tl.minimum(tl.maximum(total - round * half, 0), half), round < rounds)
        line = counters + moe_index * COUNTERS + STAGED
        tl.store(line, tl.load(line) + total)
        now = clock(tl.load(state + TICK), moe_index, layers, POLICY)
        if POLICY == LRU:
            tl.store(score + row + column, now, inside & needed)
        else:
            old = tl.load(score + row + column, inside, float("-inf")) - ages
            mass = count.to(tl.float32) * per_route * STEADY * (1.0 - tl.exp2(-ages))
            tl.store(score + row + column, used(old, mass, now), inside)


@triton.jit(do_not_specialize=["round", "size"])
def _slots_for_round(ids, place, turn, slots, round, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    expert = tl.load(ids + at, inside, 0)
    here = tl.load(turn + expert, inside, -1) == round
    tl.store(slots + at, tl.where(here, tl.load(place + expert, here, -1), -1), inside)


@triton.jit(do_not_specialize=["moe_index", "count", "expert", "slot"])
def _seed(
    count, expert, slot, table, keys, score, queue, queue_score, counters, kept_count, kept_from, kept_to,
    moe_index, experts, slots, most, HALF: tl.constexpr,
):  # fmt: skip
    entry = tl.arange(0, HALF)
    here = entry < tl.load(count)
    row = moe_index * experts
    id = tl.load(expert + entry, here, -1)
    worth = tl.load(score + row + id, here, float("-inf"))
    ahead = (worth[None, :] > worth[:, None]) | ((worth[None, :] == worth[:, None]) & (id[None, :] < id[:, None]))
    rank = tl.sum((ahead & here[None, :]).to(tl.int32), 1)
    faced = here & (rank < slots) & (rank < most)
    victim = tl.load(queue + rank, faced, 0)
    better = faced & (worth > tl.load(queue_score + rank, faced, float("inf")))
    old = tl.load(keys + victim, better, -1)
    tl.store(table + old, -1, better & (old >= 0))
    tl.debug_barrier()
    tl.store(table + row + id, victim, better)
    tl.store(keys + victim, row + id, better)
    # Worth falls and the victims' rises with the rank, so those that are better come first.
    taken = tl.sum(better.to(tl.int32), 0)
    tl.store(kept_count, taken)
    tl.store(kept_from + rank, tl.load(slot + entry, here, 0), better)
    tl.store(kept_to + rank, victim, better)
    line = counters + moe_index * COUNTERS + SEEDED
    tl.store(line, tl.load(line) + taken)
