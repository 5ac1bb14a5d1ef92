"""Parts of a step by themselves: to measure the two lanes, and to find out whether the GPU reads what it should."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.buffers import Mailbox, SlotTensors
from ftengine.kernels.triton.cache_state import PENDING, REQUEST
from ftengine.kernels.triton.launch import INTERPRETED, PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.system import nanoseconds, store_release


def publish(pool: SlotTensors, mailbox: Mailbox, moe_index: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Asks the CPU for these experts of the rows that lie in the mailbox, as `route` does; `join` waits for them.

    ids int32 [T, K], weights float32 [T, K] with the mailbox's K, contiguous; capturable.
    """
    tokens, top_k = ids.shape
    _publish[(1,)](
        pool.state, mailbox.bell, mailbox.ids, mailbox.weights, ids, weights, moe_index, tokens, top_k,
        SIZE=triton.next_power_of_2(tokens * top_k), INTERPRETED=INTERPRETED, PDL=PDL, num_warps=1, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["moe_index", "tokens", "top_k"])
def _publish(
    state, bell, box_ids, box_weights, ids, weights, moe_index, tokens, top_k,
    SIZE: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)
    place = tl.arange(0, SIZE)
    inside = place < tokens * top_k
    request = tl.load(state + REQUEST) + 1
    tl.store(state + REQUEST, request)
    tl.store(state + PENDING, tokens)
    tl.store(box_ids + place, tl.load(ids + place, inside), inside)
    tl.store(box_weights + place, tl.load(weights + place, inside), inside)
    tl.store(bell + 1, moe_index)
    tl.store(bell + 2, tokens)
    tl.store(bell + 3, top_k)
    store_release(bell, request, INTERPRETED)


def stamp(times: torch.Tensor, place: int) -> None:
    """times[place] = the GPU's global timer, ns, once all earlier kernels are done. times: int64; capturable."""
    _stamp[(1,)](times, place, INTERPRETED=INTERPRETED, PDL=PDL, num_warps=1, **launch_options())


@triton.jit(do_not_specialize=["place"])
def _stamp(times, place, INTERPRETED: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    start_next(PDL)
    tl.store(times + place, nanoseconds(INTERPRETED))


def read_words(source: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = source[words[i]], read by a kernel. source int32, pinned; words int64 and out int32 on the device."""
    _read_words[(triton.cdiv(len(words), 1024),)](source, words, out, len(words), BLOCK=1024)


@triton.jit
def _read_words(source, words, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(source + tl.load(words + place, inside, 0), inside, 0), inside)
