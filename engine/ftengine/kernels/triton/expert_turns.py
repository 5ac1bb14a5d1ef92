"""Experts that lay in slots are computed while others cross the link: who waits for what.

The kernel that computes gate and up is launched right behind `fetch`, as a kernel that may start before `fetch` is done
(launch.py). `fetch` itself begins after `route` and lets the next kernel begin only then: so `route` is done, and all
that is before it, when the first program here starts. Chosen.turn puts the experts that were in slots first, so the
programs that wait for copies do not keep the others from their places.

Without programmatic launches, as before Hopper, everything is in the order of the launches and only the turns are left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.launch import start_next, wait_for_previous
from ftengine.kernels.triton.system import load_acquire_gpu


@triton.jit
def its_turn(number, count, slots, turn, ready, EARLY: tl.constexpr, PDL: tl.constexpr):
    """For programs (_, number): which row of Chosen is theirs, its slot, and whether there is one at all.

    Waits for as much as that one needs; EARLY: see above. The last programs of the grid wait in any case: this kernel
    is not done before all kernels before it are, and none after it starts before all blocks are there.
    """
    if EARLY:
        if PDL:
            u = load_acquire_gpu(turn + number)  # no kernel's beginning stands between this and what SMs had cached
        else:
            u = tl.load(turn + number)
        arrived, used, slot = tl.load(ready), tl.load(count), tl.load(slots + u)
        if ((number >= arrived) & (number < used)) | (number == tl.num_programs(1) - 1):
            wait_for_previous(PDL)
        start_next(PDL)
    else:
        wait_for_previous(PDL)
        start_next(PDL)
        u = number
        used, slot = tl.load(count), tl.load(slots + u)
    return u, slot, (number < used) & (slot >= 0)  # no slot is negative: so no load sinks below a branch on the other
