"""Chooses tokens from logits where they lie: two passes over a row, no copy of it to the host, no synchronization.

`scan` cuts every row into blocks and keeps of each its largest logit, where that is, and its sum of exponentials. With
those, one program a row finds the block that its random number falls into and reads only that one again (`draw`).
Rows with top_k or top_p need their likeliest tokens in order (`gather`, `draw_ordered`): the K-th largest of the
blocks' maxima is a bound that at least K tokens reach and few others do; those are collected, and each one's place
among them is counted.

Blocks are added in order and in float64, so a result does not depend on the batch or on chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.portable import bound

CANDIDATES = 512  # tokens that can be put in order
NOT_A_NUMBER = -1  # written in place of a token: the row has NaN, +inf or nothing but -inf
WIDE = -2  # written in place of a token: more of them would have to be put in order than were collected
GREEDY, PLAIN, ORDERED, WHOLE = range(4)  # WHOLE: the host will draw if the row has numbers

_NOT_A_NUMBER, _WIDE = tl.constexpr(NOT_A_NUMBER), tl.constexpr(WIDE)
_GREEDY, _ORDERED, _WHOLE = tl.constexpr(GREEDY), tl.constexpr(ORDERED), tl.constexpr(WHOLE)
_LEAST = tl.constexpr(-(2**63))


def block_size(vocabulary: int) -> int:
    """Logits a program of `scan` reads: enough blocks to fill a GPU, and to find a bound among their maxima."""
    return min(4096, max(32, 1 << (-(-vocabulary // 256) - 1).bit_length()))


def block_count(vocabulary: int) -> int:
    return -(-vocabulary // block_size(vocabulary))


@dataclass(frozen=True)
class Settings:
    """What each row asks for. Lies in mapped host memory: a write by the host before a launch is all the sending."""

    mode: torch.Tensor  # int32 [N]: GREEDY, PLAIN, ORDERED or WHOLE
    top_k: torch.Tensor  # int32 [N]: 0 without; at most CANDIDATES
    reach: torch.Tensor  # int32 [N]: ORDERED rows collect all tokens that reach the reach-th largest block maximum
    numbers: torch.Tensor  # float64 [N, 4]: temperature (above 0), top_p, min_p, uniform number in [0, 1)

    @staticmethod
    def allocate(rows: int, pinned: bool) -> Settings:
        def array(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, pin_memory=pinned)

        mode, top_k, reach = (array(torch.int32, rows) for _ in range(3))
        return Settings(mode, top_k, reach, array(torch.float64, rows, 4))


@dataclass(frozen=True)
class Workspace:
    largest: torch.Tensor  # float32 [N, blocks]: +inf for a block with a NaN
    place: torch.Tensor  # int32 [N, blocks]: the first token with the largest logit
    total: torch.Tensor  # float64 [N, blocks]: sum of exp((logit - largest) / temperature)
    count: torch.Tensor  # int32 [N]: tokens that reached the bound, those beyond CANDIDATES too
    candidates: torch.Tensor  # int64 [N, CANDIDATES]: logit and token as one number, in any order

    @staticmethod
    def allocate(rows: int, vocabulary: int, device: torch.device | str) -> Workspace:
        blocks = block_count(vocabulary)
        return Workspace(
            torch.zeros(rows, blocks, dtype=torch.float32, device=device),
            torch.zeros(rows, blocks, dtype=torch.int32, device=device),
            torch.zeros(rows, blocks, dtype=torch.float64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, CANDIDATES, dtype=torch.int64, device=device),
        )


def choose_tokens(
    logits: torch.Tensor, settings: Settings, workspace: Workspace, out: torch.Tensor, *, ordered: bool, others: bool
) -> None:
    """Queues the choice of one token a row.

    logits: float32 [N, V], rows contiguous. settings, workspace: of at least N rows.
    out: int32 [N], may be mapped host memory: the token, NOT_A_NUMBER or WIDE.
    ordered, others: whether rows with mode ORDERED and rows with another are among them.
    """
    rows, vocabulary = logits.shape
    block, blocks = block_size(vocabulary), block_count(vocabulary)
    width = max(16, triton.next_power_of_2(blocks))
    w = workspace
    _scan[(blocks, rows)](
        logits, settings.numbers, w.largest, w.place, w.total, w.count, logits.stride(0), vocabulary, blocks, block,
        num_warps=4,
    )  # fmt: skip
    if others:
        _draw[(rows,)](
            logits, settings.mode, settings.numbers, w.largest, w.place, w.total, out,
            logits.stride(0), vocabulary, blocks, width, block, num_warps=4,
        )  # fmt: skip
    if ordered:
        _gather[(blocks, rows)](
            logits, settings.mode, settings.reach, w.largest, w.count, w.candidates,
            logits.stride(0), vocabulary, blocks, width, block, CANDIDATES, num_warps=4,
        )  # fmt: skip
        _draw_ordered[(rows,)](
            settings.mode, settings.top_k, settings.numbers, w.largest, w.total, w.count, w.candidates, out,
            blocks, width, CANDIDATES, num_warps=8,
        )  # fmt: skip


def hand_on(out: torch.Tensor, ids: torch.Tensor) -> None:
    """Queues ids[:] = out[:N], with token 0 where `choose_tokens` wrote none.

    out: int32 [at least N], may be mapped host memory. ids: int32 [N].
    """
    _hand_on[(len(ids),)](out, ids, num_warps=1)


@triton.jit
def _hand_on(out, ids):
    row = tl.program_id(0)
    tl.store(ids + row, tl.maximum(tl.load(out + row), 0))


@triton.jit
def _scan(
    logits, numbers, largest, place, total, count, stride, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * stride + token, token < V, other=-float("inf"))
    temperature = tl.load(numbers + 4 * row).to(tl.float32)
    # A maximum may pass over NaN; +inf is as bad and it does not.
    values = tl.where(values != values, float("inf"), values)
    top = tl.max(values, 0)
    first = tl.min(tl.where(values == top, token, V), 0)
    base = tl.where((top == float("inf")) | (top == -float("inf")), 0.0, top)  # the difference of two would be NaN
    weights = tl.exp((values - base) / temperature)
    at = row * BLOCKS + block
    tl.store(largest + at, top)
    tl.store(place + at, first)
    tl.store(total + at, tl.sum(weights.to(tl.float64), 0))
    if block == 0:
        tl.store(count + row, 0)


@triton.jit
def _draw(
    logits, mode, numbers, largest, place, total, out, stride,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kind = tl.load(mode + row)
    if kind != _ORDERED:
        block = tl.arange(0, WIDTH)
        at = row * BLOCKS + block
        tops = tl.load(largest + at, block < BLOCKS, other=-float("inf"))
        top = tl.max(tops, 0)
        if (top == float("inf")) | (top == -float("inf")):
            tl.store(out + row, _NOT_A_NUMBER)
        elif kind == _WHOLE:
            tl.store(out + row, _WIDE)
        elif kind == _GREEDY:
            tl.store(out + row, tl.load(place + row * BLOCKS + tl.min(tl.where(tops == top, block, WIDTH), 0)))
        else:
            temperature = tl.load(numbers + 4 * row).to(tl.float32)
            least = tl.load(numbers + 4 * row + 2)
            uniform = tl.load(numbers + 4 * row + 3)
            line = logits + row.to(tl.int64) * stride
            scale = tl.exp((tops - top) / temperature).to(tl.float64)
            if least > 0:
                # What counts in a block is known only now; a block whose best token is too unlikely has nothing.
                shares = tl.zeros([WIDTH], tl.float64)
                for number in range(BLOCKS):
                    if tl.sum(tl.where(block == number, scale, 0.0), 0) >= least:
                        weights = _weights(line, number, top, temperature, least, V, BLOCK)
                        shares = tl.where(block == number, tl.sum(weights, 0), shares)
            else:
                shares = tl.load(total + at, block < BLOCKS, other=0.0) * scale
            sums = tl.cumsum(shares, 0)
            target = uniform * tl.sum(shares, 0)
            last = tl.max(tl.where(shares > 0, block, 0), 0)
            number = tl.minimum(tl.sum((sums <= target).to(tl.int32), 0), last)
            rest = target - tl.sum(tl.where(block < number, shares, 0.0), 0)
            weights = _weights(line, number, top, temperature, least, V, BLOCK)
            offset = tl.arange(0, BLOCK)
            last = tl.max(tl.where(weights > 0, offset, 0), 0)
            chosen = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0), last)
            tl.store(out + row, number * BLOCK + chosen)


@triton.jit
def _weights(line, number, top, temperature, least, V: tl.constexpr, BLOCK: tl.constexpr):
    """float64 [BLOCK]: a block's probabilities as multiples of the likeliest token's."""
    token = number * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(line + token, token < V, other=-float("inf"))
    weights = tl.exp((values - top) / temperature).to(tl.float64)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def _gather(
    logits, mode, reach, largest, count, candidates, stride,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    number, row = tl.program_id(0), tl.program_id(1)
    if tl.load(mode + row) == _ORDERED:
        wanted = tl.load(reach + row)
        block = tl.arange(0, WIDTH)
        tops = tl.load(largest + row * BLOCKS + block, block < BLOCKS, other=-float("inf"))
        rank = tl.zeros([WIDTH], tl.int32)
        for start in range(0, WIDTH, 16):
            other = start + tl.arange(0, 16)
            compared = tl.load(largest + row * BLOCKS + other, other < BLOCKS, other=-float("inf"))
            rank += tl.sum((compared[None, :] > tops[:, None]).to(tl.int32), 1)
        least = tl.min(tl.where(rank < wanted, tops, float("inf")), 0)
        least = tl.where(wanted > BLOCKS, -float("inf"), least)
        if tl.load(largest + row * BLOCKS + number) >= least:
            token = number * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(logits + row.to(tl.int64) * stride + token, token < V, other=-float("inf"))
            taken = (values >= least) & (values > -float("inf"))
            found = tl.sum(taken.to(tl.int32), 0)
            # Blocks arrive in any order; each candidate's place among all of them is counted later.
            at = tl.atomic_add(count + row, found) + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(candidates + row * CANDIDATES + at, _key(values, token), taken & (at < CANDIDATES))


@triton.jit
def _key(values, token):
    """int64 that sorts as the logit does, and of equals the smaller token after the larger."""
    values = tl.where(values == 0, 0.0, values)  # -0.0 has other bits
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _draw_ordered(
    mode, top_k, numbers, largest, total, count, candidates, out,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(mode + row) == _ORDERED:
        block = tl.arange(0, WIDTH)
        tops = tl.load(largest + row * BLOCKS + block, block < BLOCKS, other=-float("inf"))
        top = tl.max(tops, 0)
        found = tl.load(count + row)
        if (top == float("inf")) | (top == -float("inf")):
            tl.store(out + row, _NOT_A_NUMBER)
        elif found > CANDIDATES:
            tl.store(out + row, _WIDE)
        else:
            temperature = tl.load(numbers + 4 * row).to(tl.float32)
            nucleus = tl.load(numbers + 4 * row + 1)
            least = tl.load(numbers + 4 * row + 2)
            uniform = tl.load(numbers + 4 * row + 3)
            limit = tl.load(top_k + row)
            mine = row * CANDIDATES + tl.arange(0, CANDIDATES)
            keys, weights = _candidates(candidates + mine, tl.arange(0, CANDIDATES) < found, top, temperature)
            rank = tl.zeros([CANDIDATES], tl.int32)
            before = tl.zeros([CANDIDATES], tl.float64)  # the sum of what is likelier
            for start in range(bound(0), bound(found), 16):
                other = start + tl.arange(0, 16)
                compared, added = _candidates(candidates + row * CANDIDATES + other, other < found, top, temperature)
                likelier = compared[None, :] > keys[:, None]
                rank += tl.sum(likelier.to(tl.int32), 1)
                before += tl.sum(tl.where(likelier, added[None, :], 0.0), 1)
            if limit > 0:
                weights = tl.where(rank < limit, weights, 0.0)
            inside = tl.sum(weights, 0)
            if limit > 0:
                whole = inside
            else:  # the nucleus is a share of the whole vocabulary
                scale = tl.exp((tops - top) / temperature).to(tl.float64)
                whole = tl.sum(tl.load(total + row * BLOCKS + block, block < BLOCKS, other=0.0) * scale, 0)
            target = nucleus * whole
            if (limit == 0) & (nucleus < 1) & (inside < target):
                tl.store(out + row, _WIDE)
            else:
                # What is kept are the likeliest, so `before` is also the sum of those that are kept and likelier.
                keep = (weights > 0) & (((before < target) & (weights >= least)) | (rank == 0))
                target = uniform * tl.sum(tl.where(keep, weights, 0.0), 0)
                last = tl.max(tl.where(keep & (before <= target), rank, 0), 0)
                key = tl.sum(tl.where(keep & (rank == last), keys, 0), 0)
                tl.store(out + row, (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32))


@triton.jit
def _candidates(at, there, top, temperature):
    """Keys, and float64 probabilities as multiples of the likeliest token's; 0 where there is none."""
    keys = tl.load(at, there, other=_LEAST)
    bits = (keys >> 32).to(tl.int32)
    values = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    weights = tl.exp((tl.where(there, values, top) - top) / temperature)
    return keys, tl.where(there, weights, 0.0).to(tl.float64)
