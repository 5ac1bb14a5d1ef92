"""What all kernels share about being launched: interpreter or GPU, programmatic dependent launch, size of the GPU.

Programmatic dependent launch (PDL, compute capability 9.0): a kernel starts while the one before it still runs and
waits, with `wait_for_previous`, before it touches anything that an earlier kernel writes or reads. It may load weights
before, whose upload must be over by then: synchronize once after loading a model. Every kernel that is launched with
`launch_options()` must wait once in every program: "all before me are done" holds for the whole chain only if it holds
at each link. expert_turns.py has the one exception, and why that holds.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret  # kernels run on the CPU, in numpy


def _pdl() -> bool:
    if INTERPRETED or os.environ.get("FT_PDL") == "0" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


PDL: bool = _pdl()  # FT_PDL=0 turns it off


def launch_options() -> dict[str, bool]:
    """Keyword arguments of a launch `kernel[grid](..., PDL=PDL, **launch_options())`."""
    return {"launch_pdl": True} if PDL else {}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; in the interpreter, a number that makes tests loop."""
    return 3 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when all earlier kernels are done and what they wrote is visible."""
    if PDL:
        gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next kernel may start once all programs of this one came here or ended."""
    if PDL:
        gdc_launch_dependents()
