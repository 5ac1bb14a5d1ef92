"""Where the numbers of the expert cache stand in its tensors (buffers.SlotTensors), and the rule that scores experts.

The score of an expert is a logarithm on a scale that grows with time: what happened `HALF_LIFE` steps ago counts half
of what happens now, and nothing needs ageing between uses. `end_step` moves the scale back every PERIOD steps, so that
float32 keeps its resolution.

    aged  log2 of the sum over past steps of the router's probability x 2 ^ (-age / HALF_LIFE), near misses included
    lru   when the expert was last used, in steps; layers count as fractions of a step
"""

from __future__ import annotations

import triton
import triton.language as tl

# state, int32
STEP = tl.constexpr(0)  # decode steps so far, modulo 2 ** 32
TICK = tl.constexpr(1)  # of them since the scale of the scores was last moved
REQUEST = tl.constexpr(2)  # number of the last request to the CPU, modulo 2 ** 32: days of decoding
HEAD = tl.constexpr(3)  # of the queue of victims: the first entry that may still be taken
ARRIVED = tl.constexpr(4)  # rows of the layer under way that are routed
PENDING = tl.constexpr(5)  # rows that the CPU works on for the layer under way, 0: none
TRACED = tl.constexpr(6)  # steps recorded since the recording began
LAYER = tl.constexpr(7)  # of the layer under way, a byte each: rows, missing, fetched, found; 255: that many or more
BEGAN = tl.constexpr(8)  # when its `route` did, ns: the lower half of the GPU's clock
COPYING = tl.constexpr(9)  # experts that are listed by prefetch.py and not copied yet
STATE_SIZE = 16

# control, float32
GATE = tl.constexpr(0)  # not 0: a fetched expert is kept only if its score beats that of what it replaces
BUDGET = tl.constexpr(1)  # experts a layer copied in the background, at most ADMIT_MAX; 0.25: one in four layers
TRACE = tl.constexpr(2)  # not 0: record
TRIES = tl.constexpr(3)  # layers from one trial of another split to the next, see split.py; 0: none
PREFETCH_MOST = tl.constexpr(4)  # experts that are prefetched for a layer, at most PREFETCH_MAX; see prefetch.py
CONTROL_SIZE = 16

# record, int32: what a layer of a step did, for the last RECORDED steps
WHAT = tl.constexpr(0)  # as LAYER in `state`
ASKED = tl.constexpr(1)  # number of the request to the CPU, 0: none
COPY = tl.constexpr(2)  # ns that the fetched experts took over the link
GPU_DONE = tl.constexpr(3)  # ns from `route` until the GPU had nothing left to do
DONE = tl.constexpr(4)  # and until the CPU's part was added, too
AT_STEP = tl.constexpr(5)  # STEP + 1
AT_TIME = tl.constexpr(6)  # BEGAN
AWAITED = tl.constexpr(7)  # as PREFETCH_AWAITED
RECORD = tl.constexpr(8)
RECORDED = tl.constexpr(32)  # a power of two: STEP may have wrapped around

# counters, int64, a row a layer
HITS = tl.constexpr(0)  # distinct experts of a step found in slots
MISSES = tl.constexpr(1)  # and not found
FETCHED = tl.constexpr(2)  # of the misses: copied over the link and computed on the GPU
KEPT = tl.constexpr(3)  # of the fetched: stay in a slot
CPU_EXPERTS = tl.constexpr(4)  # of the misses: computed on the CPU
CPU_ROUTES = tl.constexpr(5)  # (token, expert) pairs that those were
ADMITTED = tl.constexpr(6)  # copied into slots in the background
STEPS = tl.constexpr(7)
WAITED = tl.constexpr(8)  # ns that the GPU waited for the CPU
STAGED = tl.constexpr(9)  # copied over the link for prefill
SEEDED = tl.constexpr(10)  # of them kept in a slot
# ns that copies over the link took: fetched, admitted, staged; not prefetched, at whose time `route` counts in this row
COPIED = tl.constexpr(11)
LAST_COPY = tl.constexpr(12)  # of them, those of the last `fetch`
PREFETCHED = tl.constexpr(13)  # copied into slots before their layer began
FORETOLD = tl.constexpr(14)  # of them, those that it then used: hits, too
COUNTERS = tl.constexpr(16)

ADMIT_MAX = tl.constexpr(4)
ADMIT_COUNT, ADMIT_COPIED = tl.constexpr(0), tl.constexpr(1)  # columns of `admit`; then experts, then slots
ADMIT_EXPERT = tl.constexpr(2)
ADMIT_SLOT = tl.constexpr(2 + 4)
ADMIT_SIZE = tl.constexpr(2 + 2 * 4)

PREFETCH_MAX = tl.constexpr(8)
# Columns of `prefetch`: how many are listed; programs of `copy` that have begun; entries of the list, from the first to
# the last one that is used; how many of RIGHT of those listed were used, lately, -1: none was listed yet; then experts
# (-1 where none is listed), slots, and programs that are done with them
PREFETCH_LIST, PREFETCH_STARTED, PREFETCH_AWAITED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PREFETCH_RATE = tl.constexpr(3)
RIGHT = tl.constexpr(1 << 16)
PREFETCH_EXPERT = tl.constexpr(8)
PREFETCH_SLOT = tl.constexpr(8 + 8)
PREFETCH_DONE = tl.constexpr(8 + 2 * 8)
PREFETCH_SIZE = tl.constexpr(8 + 3 * 8)

AGED, LRU = tl.constexpr(0), tl.constexpr(1)
POLICIES = {"aged": AGED.value, "lru": LRU.value}
HALF_LIFE = tl.constexpr(8.0)
SMALLEST_MASS = tl.constexpr(1e-37)  # what counts for less is worth this
PERIOD = tl.constexpr(4096)
STEADY = tl.constexpr(1.0 / (1.0 - 2.0 ** (-1.0 / 8.0)))  # sum over all ages of 2 ^ (-age / HALF_LIFE)


@triton.jit
def clock(tick, layer, layers, POLICY: tl.constexpr):
    """The present on the scale of the scores."""
    if POLICY == LRU:
        return tick.to(tl.float32) + layer.to(tl.float32) / layers.to(tl.float32)
    else:
        return tick.to(tl.float32) / HALF_LIFE


@triton.jit
def used(score, mass, now):
    """`aged`: a score after the router gave `mass` (summed over the rows of a step)."""
    return tl.log2(tl.maximum(tl.exp2(score - now) + tl.where(mass > 0.0, mass, 0.0), SMALLEST_MASS)) + now


@triton.jit
def moved_back(score, POLICY: tl.constexpr):
    if POLICY == LRU:
        return score - PERIOD
    else:
        return score - PERIOD / HALF_LIFE
