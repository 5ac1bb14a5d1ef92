"""A driver for a GPU that need not be there."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class Hopper:
    """As much of a driver as compiling takes. Neither launching nor timing is there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
