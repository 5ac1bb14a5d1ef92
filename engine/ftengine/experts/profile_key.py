"""What a measurement of the lanes holds for: this machine, its kernels, one shape of expert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftengine.formats.format import ExpertLayout
from ftengine.kernels import native
from ftengine.memory.machine import cpu_name

if TYPE_CHECKING:  # who only reads profile.json needs none
    import torch


class Key(msgspec.Struct, frozen=True):
    """Any difference makes a measurement void."""

    gpu: str
    driver: str
    cpu: str
    kernels: str
    threads: int
    gate_up: str
    down: str
    hidden: int
    intermediate: int
    activations: str

    @staticmethod
    def of(layout: ExpertLayout, threads: int, dtype: torch.dtype, device: torch.device | str) -> Key:
        """device: the GPU, or "cpu" for a measurement of the CPU alone, which asks no driver."""
        import torch

        found = torch.device(device)
        return Key(
            gpu=_gpu(found),
            driver=_driver() if found.type == "cuda" else "none",
            cpu=cpu_name(),
            kernels=native.kernel_choice()[0],
            threads=min(threads, native.granted_threads()),
            gate_up=layout.gate_up.name,
            down=layout.down.name,
            hidden=layout.hidden,
            intermediate=layout.intermediate,
            activations=str(dtype).removeprefix("torch."),
        )

    def differences(self, other: Key) -> list[str]:
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory >> 20} MiB"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if found:
        return found.group(1)
    import torch

    return f"CUDA {torch.version.cuda}"
