"""How many of a layer's missing experts cross the link while the CPU computes the rest.

The host works it out for every number of rows and of missing experts (experts/split.py) and may change it between two
steps: `split` int16 [TABLES, DECODE_TOKENS, M]. Now and then a few layers in a row try another split, so that costs are
known of more than the splits in use: [0] is in use, the others are tried in turns.
"""

from __future__ import annotations

import triton
import triton.language as tl

TRIED = tl.constexpr(4)  # layers in a row: the first wakes the lane that rested
TRIALS = tl.constexpr(4)  # TABLES - 1


@triton.jit
def shares_of(split, most, tries, turn, ROWS: tl.constexpr, T: tl.constexpr, N: tl.constexpr):
    """int32 [N]: how many to fetch of 0..N-1 missing experts. turn counts layers of steps; tries: control's TRIES."""
    every = tl.maximum(tries.to(tl.int32), 1)
    trial = (tries > 0.0) & (turn % every < TRIED)
    line = tl.where(trial, 1 + turn // every % TRIALS, 0) * ROWS + T - 1
    missing = tl.arange(0, N)
    return tl.load(split + line * most + missing, missing < most, 0).to(tl.int32)


@triton.jit
def share_of(shares, misses, N: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, N) == misses, shares, 0), 0)
