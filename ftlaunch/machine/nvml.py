"""The NVIDIA driver's management library: every call may hang, so only probes in processes of their own come here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

# nvmlClocksEventReason... of nvml.h that mean less speed than the card has, and what helps
SLOWED = {
    0x08: ("its own protection", "look at cooling and power cables: nvidia-smi -q -d PERFORMANCE"),
    0x20: ("heat", "clean or improve its cooling"),
    0x40: ("heat", "clean or improve its cooling"),
    0x80: ("the power supply", "a stronger power supply, or all its cables connected"),
}


class NotTold(Exception):
    """reason: a clause. package: whether it is only that nvidia-ml-py is missing."""

    def __init__(self, reason: str, package: bool = False) -> None:
        super().__init__(reason)
        self.package = package


@dataclass(frozen=True)
class Holder:
    pid: int
    bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """Of what the driver does not tell: None."""

    index: int
    name: str
    uuid: str
    address: str  # on the PCI bus, 0000:01:00.0
    capability: tuple[int, int] | None
    total: int
    free: int
    holders: tuple[Holder, ...] | None
    link: tuple[int, int, int, int] | None  # generation and width now, and at best
    slowed: int
    power_limit: int | None  # milliwatts
    usual_limit: int | None
    memory_rate: float | None = None  # bytes a second that its memory moves at the most


@dataclass(frozen=True)
class Driver:
    version: str  # 580.65.06
    cuda: int | None  # 1000 * major + 10 * minor


class Library:
    def __init__(self) -> None:
        """Raises NotTold."""
        try:
            import pynvml
        except ImportError:
            raise NotTold("the package nvidia-ml-py is not installed", package=True) from None
        self._nvml: Any = pynvml
        self._error: type[Exception] = pynvml.NVMLError
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            raise NotTold("the NVIDIA driver is not installed (libnvidia-ml.so.1 is not found)") from None
        except self._error as error:
            raise NotTold(f"the NVIDIA driver fails: {error}") from None

    def driver(self) -> Driver:
        version = self._told(self._nvml.nvmlSystemGetDriverVersion)
        return Driver(_text(version) or "unknown", self._told(self._nvml.nvmlSystemGetCudaDriverVersion))

    def gpus(self) -> Iterator[Gpu]:
        """In the order of the PCI bus. Raises NotTold for one that does not even tell its name or memory."""
        nvml = self._nvml
        for index in range(self._told(nvml.nvmlDeviceGetCount) or 0):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, memory = _text(nvml.nvmlDeviceGetName(handle)), nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._error as error:
                raise NotTold(f"GPU {index}: {error}") from None
            yield self._gpu(index, handle, name or "NVIDIA GPU", memory)

    def link(self, handle: Any) -> tuple[int, int, int, int] | None:
        nvml = self._nvml
        found = [
            self._told(call, handle)
            for call in (
                nvml.nvmlDeviceGetCurrPcieLinkGeneration,
                nvml.nvmlDeviceGetCurrPcieLinkWidth,
                nvml.nvmlDeviceGetMaxPcieLinkGeneration,
                nvml.nvmlDeviceGetMaxPcieLinkWidth,
            )
        ]
        return None if None in found or not all(found) else tuple(found)  # type: ignore[return-value]

    def memory_rate(self, handle: Any) -> float | None:
        """Two transfers a clock over the whole bus."""
        clock = self._told(self._nvml.nvmlDeviceGetMaxClockInfo, handle, self._nvml.NVML_CLOCK_MEM)  # MHz
        width = self._told(self._nvml.nvmlDeviceGetMemoryBusWidth, handle)  # bits
        return 2e6 * clock * width / 8 if clock and width else None

    def _gpu(self, index: int, handle: Any, name: str, memory: Any) -> Gpu:
        nvml = self._nvml
        bus = self._told(nvml.nvmlDeviceGetPciInfo, handle)
        return Gpu(
            index=index,
            name=name,
            uuid=_text(self._told(nvml.nvmlDeviceGetUUID, handle)) or "",
            address=(_text(bus.busId) or "").lower()[-12:] if bus is not None else "",
            capability=self._told(nvml.nvmlDeviceGetCudaComputeCapability, handle),
            total=int(memory.total),
            free=int(memory.free),
            holders=self._holders(handle),
            link=self.link(handle),
            slowed=self._told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0,
            power_limit=self._told(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            usual_limit=self._told(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
            memory_rate=self.memory_rate(handle),
        )

    def _holders(self, handle: Any) -> tuple[Holder, ...] | None:
        """Most bytes first."""
        nvml, found, told = self._nvml, dict[int, int | None](), False
        for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            processes = self._told(call, handle)
            told = told or processes is not None
            for process in processes or []:
                found[int(process.pid)] = process.usedGpuMemory
        holders = sorted((Holder(pid, size) for pid, size in found.items()), key=lambda holder: -(holder.bytes or 0))
        return tuple(holders) if told else None

    def _told(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """None where driver, GPU or system do not have it."""
        try:
            return call(*arguments)
        except self._error:
            return None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
