"""Loads and stores that order what the GPU and the CPU see of each other's writes to mapped host memory.

PTX `ld.acquire.sys` and `st.release.sys` (PTX ISA, memory consistency model); Triton's own atomics would go over the
bus as read-modify-write, which not every PCIe root complex does. In the interpreter they are plain ones: numpy on
x86 keeps the order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def load_acquire(pointer, INTERPRETED: tl.constexpr):
    """int32 scalar; what the writer did before its release is visible afterwards."""
    if INTERPRETED:
        return tl.load(pointer)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_acquire_gpu(pointer):
    """int32 scalar of the GPU's memory; what is loaded afterwards does not come from what an SM had cached before."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_release(pointer, value, INTERPRETED: tl.constexpr):
    """int32 scalar; a reader that sees it sees all that the whole program wrote before."""
    tl.debug_barrier()
    if INTERPRETED:
        tl.store(pointer, value)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [pointer.to(tl.int64), value],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def nanoseconds(INTERPRETED: tl.constexpr):
    """int64, of the GPU's global timer; 0 in the interpreter."""
    if INTERPRETED:
        return tl.full((), 0, tl.int64)
    else:
        return globaltimer()


# How long kernels wait for what should have come within milliseconds: better an error, from which the engine starts
# again, than a GPU that hangs. They count no more than LOOK from one look at the clock to the next: it jumps where the
# machine slept, and goes on while other programs have the GPU.
PATIENCE = tl.constexpr(60_000_000_000)  # ns, for what this GPU does by itself
PULSES = tl.constexpr(20)  # for the CPU, as many as it says a second: a process that is stopped says nothing, and waits
STOPPED = tl.constexpr(600_000_000_000)  # ns, for a CPU that says nothing
LOOK = tl.constexpr(1_000_000)  # ns


@triton.jit
def passed(before, now):
    """int64: ns between two looks at the clock, as far as they count."""
    return tl.minimum(tl.maximum(now - before, 0), LOOK)


@triton.jit
def wait_for_count(pointer, least):
    """Until the int32 of the GPU's memory is `least` or more; what was done before it was counted is visible then.

    Not in the interpreter, where everything has its order. After PATIENCE the launch fails: longer than most stops of a
    process, which may come while half of a graph is launched.
    """
    spent, last = tl.full((), 0, tl.int64), globaltimer()
    while load_acquire_gpu(pointer) < least:
        now = globaltimer()
        spent += passed(last, now)
        last = now
        tl.inline_asm_elementwise(
            "{ .reg .pred late; setp.gt.s64 late, $1, $2; @late trap; mov.u32 $0, 0; }",
            "=r,l,l",
            [spent, tl.full((), PATIENCE, tl.int64)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
