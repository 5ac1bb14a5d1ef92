"""What an error means for the engine, by the types and texts that torch 2.11 to 2.13 and Triton 3.6 really raise."""

from __future__ import annotations

import pytest
import torch

from ftengine.memory.gpu_errors import is_fatal, is_out_of_memory

NOTE = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace is incorrect."


def cuda_errors() -> list[Exception]:
    accelerator = getattr(torch, "AcceleratorError", RuntimeError)
    return [
        accelerator(f"CUDA error: an illegal memory access was encountered{NOTE}"),
        accelerator(f"CUDA error: unspecified launch failure{NOTE}"),
        accelerator(f"CUDA error: device-side assert triggered{NOTE}"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("CUDA driver error: device not ready"),
    ]


EXHAUSTED = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
OWN = [ValueError("CUDA error in a text"), RuntimeError("shape '[3]' is invalid"), KeyError("x"), OSError("disk")]


@pytest.mark.parametrize("error", EXHAUSTED, ids=str)
def test_memory_that_ran_out_is_survived(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_fatal(error)


@pytest.mark.parametrize("error", cuda_errors(), ids=lambda error: str(error)[:60])
def test_a_gpu_that_is_lost_is_fatal(error: Exception) -> None:
    assert is_fatal(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", OWN, ids=str)
def test_other_errors_are_neither(error: Exception) -> None:
    assert not is_fatal(error)
    assert not is_out_of_memory(error)


def test_the_cause_counts() -> None:
    def fail() -> None:
        try:
            raise RuntimeError("CUDA error: unspecified launch failure")
        except RuntimeError as error:
            raise ValueError("layer 3") from error

    with pytest.raises(ValueError, match="layer 3") as caught:
        fail()
    assert is_fatal(caught.value)


def test_the_cpus_allocator_raises_what_is_known() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
