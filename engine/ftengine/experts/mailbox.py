"""The memory through which a GPU hands routes to the CPU: where it comes from, and what its error numbers say."""

from __future__ import annotations

import torch

from ftengine.kernels.triton.buffers import LINE, Mailbox

CLOSED = 6  # of these
# Values of `Mailbox.error[0]`: 1 is written by the GPU, the others by the lane (csrc/lane.h, LaneError; lane.py).
ERRORS = {
    1: "the GPU waited for the CPU's experts in vain",
    2: "the GPU asked for experts of a layer that has none",
    3: "the GPU asked for more rows or routes than the mailbox holds",
    4: "the GPU asked for an expert that the layer does not have",
    5: "there was no memory to compute the CPU's experts in",
    CLOSED: "the CPU's part of the experts has ended",
}


def allocate(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, device: torch.device | str) -> Mailbox:
    """Zeroed; pinned and mapped where `device` is a GPU, plain memory otherwise.

    Raises RuntimeError where pinned memory is not to be had.
    """
    size = Mailbox.size(tokens, top_k, hidden, dtype)
    buffer = torch.zeros(size + 2 * LINE, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    return Mailbox.carve(buffer[-buffer.data_ptr() % (2 * LINE) :], tokens, top_k, hidden, dtype)


def error_of(mailbox: Mailbox) -> str | None:
    """What went wrong since the mailbox was made, as a sentence's main clause; None if nothing did."""
    number = int(mailbox.error[0])
    return None if number == 0 else ERRORS.get(number, f"the mailbox between GPU and CPU reports error {number}")
