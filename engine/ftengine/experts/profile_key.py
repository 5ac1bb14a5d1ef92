"""What a measurement of the lanes holds for: this machine, its kernels, one shape of expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftengine.formats.format import ExpertLayout
from ftengine.kernels import native
from ftengine.memory.machine import cpu_name

if TYPE_CHECKING:  # who only reads profile.json needs none
    import torch

MEMORY_APART = 1 / 16  # of a GPU's memory: how much of it there is, CUDA tells in more than one way
WORDS = {  # fields of a key, for people
    "gpu": "GPU",
    "cpu": "CPU",
    "threads": "number of threads",
    "gate_up": "format",
    "down": "format",
    "hidden": "shape",
    "intermediate": "shape",
    "activations": "dtype of activations",
}

Known = Mapping[str, str | int]  # fields of a key, as far as they can be told


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

        gpu, driver = "none", "none"
        if torch.device(device).type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            gpu = gpu_of(properties.name, properties.total_memory)
            driver = driver_of(torch.version.cuda) or "unknown"
        activations, kernels = str(dtype).removeprefix("torch."), native.kernel_choice()[0]
        fields = known(layout, threads, activations, gpu=gpu, driver=driver, cpu=cpu_name(), kernels=kernels)
        return msgspec.convert(fields, Key)

    def differences(self, wanted: Key | Known) -> list[str]:
        """Fields in which they differ, of those that are known of `wanted`."""
        fields = msgspec.structs.asdict(wanted) if isinstance(wanted, Key) else wanted
        return [name for name in self.__struct_fields__ if name in fields and not self._is(name, fields[name])]

    def _is(self, name: str, wanted: str | int) -> bool:
        own = getattr(self, name)
        return _same_gpu(own, str(wanted)) if name == "gpu" else bool(own == wanted)


def known(
    layout: ExpertLayout,
    threads: int,
    activations: str,
    *,
    gpu: str | None,
    driver: str | None,
    cpu: str | None,
    kernels: str | None,
) -> dict[str, str | int]:
    """A key's fields without those that are None: nobody knows them, or asks. Torch-free.

    threads: of the CPU's lane, as were asked for. activations: their dtype's name.
    """
    fields = {
        "gpu": gpu,
        "driver": driver,
        "cpu": cpu,
        "kernels": kernels,
        "threads": min(threads, native.granted_threads()),
        "gate_up": layout.gate_up.name,
        "down": layout.down.name,
        "hidden": layout.hidden,
        "intermediate": layout.intermediate,
        "activations": activations,
    }
    return {name: value for name, value in fields.items() if value is not None}


def gpu_of(name: str, memory: int | None) -> str:
    """memory: bytes as CUDA tells them, None where it was not asked."""
    return name if memory is None else f"{name}, {memory >> 20} MiB"


def driver_of(cuda: str | None, told: str | None = None) -> str | None:
    """The NVIDIA driver's version, else the CUDA that PyTorch was built for. None where neither is known.

    cuda: that of PyTorch, such as "12.8". told: /proc/driver/nvidia/version's text, None to read it.
    """
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _driver_text() if told is None else told)
    if found:
        return found.group(1)
    return None if cuda is None else f"CUDA {cuda}"


def words(different: Iterable[str]) -> str:
    """Of fields of a key: "GPU, driver"."""
    return ", ".join(dict.fromkeys(WORDS.get(name, name) for name in different))


def _same_gpu(found: str, wanted: str) -> bool:
    """By name, and by memory where both tell of it."""
    (name, memory), (other, others) = _parts(found), _parts(wanted)
    if memory is None or others is None:
        return name == other
    return name == other and abs(memory - others) <= MEMORY_APART * max(memory, others)


def _parts(gpu: str) -> tuple[str, int | None]:
    """Name and MiB."""
    found = re.fullmatch(r"(.*), (\d+) MiB", gpu)
    return (found.group(1), int(found.group(2))) if found else (gpu, None)


def _driver_text() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
