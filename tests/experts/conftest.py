"""Without a CUDA device the kernels run in Triton's interpreter, on CPU tensors: as exact, and slow."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


@pytest.fixture(scope="session")
def device() -> str:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    return "cuda" if torch.cuda.is_available() else "cpu"
