"""What an error of a step means for the engine: memory ran out, or the GPU cannot be used by this process any more.

Torch and Triton report the same trouble as several types and, from the driver, as text; here is the one place that
knows them.
"""

from __future__ import annotations

from collections.abc import Iterator

# cudaErrorMemoryAllocation as torch and Triton word it, cuBLAS's own status, the CPU allocator's RuntimeError
EXHAUSTED = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "allocate memory")
# cudaError of torch before AcceleratorError, cuError of Triton's launcher, and the libraries' statuses
BROKEN = ("CUDA error", "Triton Error [CUDA]", "CUDA driver error", "CUBLAS_STATUS_", "cuDNN error", "NCCL error")


def is_out_of_memory(error: BaseException) -> bool:
    """Memory of the host or of the GPU; the process can go on."""
    import torch

    for found in _chain(error):
        if isinstance(found, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(found, RuntimeError) and any(text in str(found) for text in EXHAUSTED):
            return True
    return False


def is_fatal(error: BaseException) -> bool:
    """A failed launch, an illegal address, a lost device: nothing that this process still computes can be trusted, and
    most errors of this kind come again at every later call. Only a new process helps."""
    import torch

    if is_out_of_memory(error):
        return False
    accelerator = getattr(torch, "AcceleratorError", ())
    return any(
        isinstance(found, accelerator)
        or (isinstance(found, RuntimeError) and any(text in str(found) for text in BROKEN))
        for found in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
