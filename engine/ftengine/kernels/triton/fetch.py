"""Copies of experts' blocks from pinned host memory into slots, by the GPU's own loads; lists and counts are on the
device, so nothing is decided on the host.

`fetch` runs in the step's stream, after `route` and before the experts that it copies are computed: those that were in
slots do not wait for it. It is over when the experts that prefetch.py copies for its layer are there, too. `admit` runs
beside everything that follows its layer's `fetch`, on another stream that joins the step's before `end_step`: the slots
it writes are in no table until then. It shares the link with the next layers' `fetch`, which is why its list is short.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import FetchList, RouteBuffers, SlotTensors
from ftengine.kernels.triton.cache_state import (
    ADMIT_COPIED,
    ADMIT_COUNT,
    ADMIT_EXPERT,
    ADMIT_SLOT,
    COPIED,
    LAST_COPY,
    PREFETCH_AWAITED,
    PREFETCH_DONE,
)
from ftengine.kernels.triton.launch import INTERPRETED, PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound
from ftengine.kernels.triton.system import nanoseconds, wait_for_count

PIECE = 2048  # int64 a program has in flight: 16 KiB
PROGRAMS = 2 if INTERPRETED else 32  # x 16 KiB cover the link's latency of ~2 us at 55 GB/s several times
BACKGROUND_PROGRAMS = 2 if INTERPRETED else 8
PREFETCH_PROGRAMS = 2 if INTERPRETED else 16
WARPS = 8


class Bank(Protocol):
    """One layer's experts (experts/pool.py ExpertBank)."""

    @property
    def blocks(self) -> torch.Tensor: ...  # uint8 [E, block_bytes], readable by the GPU


def fetch(pool: SlotTensors, moe_index: int, bank: Bank, buffers: RouteBuffers) -> None:
    """Copies the blocks that `route` listed in buffers.fetch; capturable. bank.blocks: pinned, or the device's."""
    if pool.readable and not pool.resident:
        copy_blocks(pool, bank, buffers.fetch, moe_index, in_chain=PDL, awaits=True)


def copy_blocks(
    pool: SlotTensors,
    bank: Bank,
    listed: FetchList,
    moe_index: int | None = None,
    *,
    in_chain: bool = False,
    awaits: bool = False,
) -> None:
    """pool.blocks[listed.slot[i]] = bank.blocks[listed.expert[i]] for i < listed.count.

    moe_index: whose counters get the time it took; None: nobody's. in_chain: launched early, between two kernels of the
    step that wait for each other (launch.py). awaits: it is not over before the layer's prefetched experts are there,
    those that `route` wants (prefetch.py).
    """
    timed = moe_index is not None
    _copy_blocks[(PROGRAMS,)](
        words(pool.blocks), words(bank.blocks), listed.count, listed.expert, listed.slot, listed.count,
        pool.counters[moe_index] if timed else pool.counters, pool.prefetch[moe_index] if timed else pool.prefetch,
        pool.blocks.shape[1] // 8, bank.blocks.shape[1] // 8,
        PIECE=PIECE, MARK=False, TIMED=timed, AWAITS=PREFETCH_PROGRAMS if awaits else 0, INTERPRETED=INTERPRETED,
        PDL=in_chain, num_warps=WARPS,
        **(launch_options() if in_chain else {}),
    )  # fmt: skip


def copy_within(pool: SlotTensors, listed: FetchList) -> None:
    """pool.blocks[listed.slot[i]] = pool.blocks[listed.expert[i]] for i < listed.count, no slot on both sides."""
    all_words = words(pool.blocks)
    _copy_blocks[(8 * PROGRAMS,)](
        all_words, all_words, listed.count, listed.expert, listed.slot, listed.count, pool.counters, pool.prefetch,
        all_words.shape[1], all_words.shape[1],
        PIECE=PIECE, MARK=False, TIMED=False, AWAITS=0, INTERPRETED=INTERPRETED, PDL=False, num_warps=WARPS,
    )  # fmt: skip


def admit(pool: SlotTensors, moe_index: int, bank: Bank) -> None:
    """Copies the blocks that `route` chose for the background in this layer; capturable, on a stream of its own."""
    if not pool.readable or pool.resident or not pool.slots:
        return
    row = pool.admit[moe_index]
    _copy_blocks[(BACKGROUND_PROGRAMS,)](
        words(pool.blocks), words(bank.blocks), row[ADMIT_COUNT.value :], row[ADMIT_EXPERT.value :],
        row[ADMIT_SLOT.value :], row[ADMIT_COPIED.value :], pool.counters[moe_index], pool.prefetch,
        pool.blocks.shape[1] // 8, bank.blocks.shape[1] // 8,
        PIECE=PIECE, MARK=True, TIMED=True, AWAITS=0, INTERPRETED=INTERPRETED, PDL=False, num_warps=WARPS,
    )  # fmt: skip


def words(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.int64)


@triton.jit
def copy_piece(origin, target, piece, block_words, PIECE: tl.constexpr):
    """Of a block of so many int64."""
    word = piece * PIECE + tl.arange(0, PIECE)
    inside = word < block_words
    tl.store(target + word, tl.load(origin + word, inside), inside)


@triton.jit(do_not_specialize=["count", "expert", "slot", "copied"])
def _copy_blocks(
    slots, source, count, expert, slot, copied, counters, prefetch, slot_words, block_words,
    PIECE: tl.constexpr, MARK: tl.constexpr, TIMED: tl.constexpr, AWAITS: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)
    entries = tl.load(count)
    pieces = tl.cdiv(block_words, PIECE)
    if TIMED:
        before = tl.load(counters + COPIED)
        start = nanoseconds(INTERPRETED)
    if MARK:  # noqa: SIM102 (one is known when the kernel is compiled)
        if tl.program_id(0) == 0:
            tl.store(copied, entries)
    for item in range(bound(tl.program_id(0)), bound(entries * pieces), bound(tl.num_programs(0))):
        entry = item // pieces
        origin = source + tl.load(expert + entry).to(tl.int64) * block_words
        target = slots + tl.load(slot + entry).to(tl.int64) * slot_words
        copy_piece(origin, target, item % pieces, block_words, PIECE)
    if TIMED:  # noqa: SIM102 (one is known when the kernel is compiled)
        # No program has more pieces than the first, and all share the link: its time is the kernel's, without atomics.
        # No other kernel writes this counter meanwhile: a layer's copies, and what else counts for it, have an order.
        if (tl.program_id(0) == 0) & (entries > 0):
            tl.debug_barrier()  # every thread has what it asked for
            if INTERPRETED:
                spent = tl.full((), 1, tl.int64)  # copies instead of time
            else:
                spent = nanoseconds(INTERPRETED) - start
            tl.store(counters + COPIED, before + spent)
            if not MARK:
                tl.store(counters + LAST_COPY, spent)
    if AWAITS > 0 and not INTERPRETED:  # noqa: SIM102 (one is known when the kernel is compiled)
        if tl.program_id(0) == 0:
            for entry in range(tl.load(prefetch + PREFETCH_AWAITED)):
                wait_for_count(prefetch + PREFETCH_DONE + entry, AWAITS)
