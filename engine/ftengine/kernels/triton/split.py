"""How many of a layer's missing experts cross the link while the CPU computes the rest.

Both lanes' times are a + b * n (experts/split.py is the reference and explains the rule).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.cache_state import A_CPU, A_LINK, B_CPU, B_LINK, SHARE


@triton.jit
def link_share(misses, control, N: tl.constexpr):
    """int32: how many of `misses` < N to fetch. Of equally fast splits the one that fetches most: a slot lasts."""
    fetched = tl.arange(0, N)
    left = (misses - fetched).to(tl.float32)
    link = tl.load(control + A_LINK) + tl.load(control + B_LINK) * fetched.to(tl.float32)
    cpu = tl.load(control + A_CPU) + tl.load(control + B_CPU) * left
    time = tl.maximum(tl.where(fetched > 0, link, 0.0), tl.where(left > 0, cpu, 0.0))
    time = tl.where(fetched <= misses, time, float("inf"))
    fastest = tl.max(tl.where(time <= tl.min(time, 0), fetched, 0), 0)
    share = tl.load(control + SHARE)
    forced = misses - tl.floor(share * misses.to(tl.float32) + 0.5).to(tl.int32)
    return tl.where(share < 0.0, fastest, tl.minimum(tl.maximum(forced, 0), misses))
