"""Facts of the GPU, asked without risk to the process that asks, and whether the engine uses it. Torch-free."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ftengine.config import CACHE_SIZES, EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory import compiler
from ftengine.memory.compiler import Lacking
from ftengine.memory.machine import available_memory
from ftengine.memory.sizes import gigabytes

T = TypeVar("T")

LEAST_CAPABILITY = (8, 0)  # bfloat16 in tensor cores
PROBE_SECONDS = 30.0  # a driver that has slept takes some seconds for each GPU
INIT_SECONDS = 60.0
ON_CPU = "ft serve --device cpu"
CUDA_BUILD = "pip install --force-reinstall torch (its usual build for Linux)"
# Without any of them no GPU of this machine can be reached; /dev/dxg is WSL 2's
DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
# The first driver of each CUDA, on Linux: release notes of the CUDA toolkit, "CUDA Driver" table
FIRST_DRIVERS = {11: "450", 12: "525", 13: "580"}


class Gpu(msgspec.Struct, frozen=True):
    """name and compute capability; bytes of memory, free ones beside a CUDA context; version of CUDA that the driver
    has, 1000 * major + 10 * minor; how many GPUs there are, of which this is the first."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    cuda: int
    count: int

    def __str__(self) -> str:
        return f"{self.name}, {gigabytes(self.free)} of {gigabytes(self.total)} free"


class NoGpu(msgspec.Struct, frozen=True):
    """reason: a clause, such as "no NVIDIA driver is installed"."""

    reason: str


def probe(seconds: float = PROBE_SECONDS) -> Gpu | NoGpu:
    """Asks the driver in a child process (memory/driver.py); a driver that does not answer in time is no GPU."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("driver.py"))]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        return NoGpu(f"the NVIDIA driver cannot be asked: {error.strerror}")
    try:
        answer, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _leave(child)
        return NoGpu(f"the NVIDIA driver does not answer within {seconds:g} s; nvidia-smi may tell more")
    if child.returncode != 0:
        return NoGpu(f"the NVIDIA driver ended the program that asked it (status {child.returncode})")
    try:
        return msgspec.json.decode(answer, type=Gpu)
    except msgspec.DecodeError:
        return _no_gpu(answer)


def interpreter() -> Gpu:
    """Triton's interpreter as a GPU, which takes host memory. For tests of the GPU's code without one."""
    memory, _ = available_memory()
    return Gpu("interpreter of Triton", (9, 0), memory, memory, 0, 1)


def choose_device(asked: str, gpu: Gpu | NoGpu, torch_cuda: str | None) -> Resolved[str]:
    """ "cuda" or "cpu". torch_cuda: the CUDA version that torch was built for, None without.

    Raises ConfigError when a GPU is asked for that cannot be used.
    """
    if asked in ("cpu", "interpret"):
        return Resolved(asked, "asked for")
    lacking = unusable(gpu, torch_cuda)
    if lacking is None:
        assert isinstance(gpu, Gpu)
        among = f", the first of {gpu.count}; CUDA_VISIBLE_DEVICES chooses" if gpu.count > 1 else ""
        return Resolved("cuda", f"{gpu}{among}")
    reason, mend = lacking
    if asked == "cuda":
        raise ConfigError(f"no GPU here: {reason}", f"{mend}; until then {ON_CPU}" if mend else ON_CPU)
    return Resolved("cpu", f"{reason}; {mend}" if mend else reason)


def unusable(gpu: Gpu | NoGpu, torch_cuda: str | None) -> Lacking | None:
    """Why the engine cannot use it, and what helps; None if it can."""
    if isinstance(gpu, NoGpu):
        return Lacking(gpu.reason, "")
    if gpu.capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (gpu.capability, LEAST_CAPABILITY))
        return Lacking(f"the {gpu.name} has compute capability {has}, {needs} is needed", "")
    if torch_cuda is None:
        return Lacking("the PyTorch that is installed is built without CUDA", CUDA_BUILD)
    if is_old(gpu.cuda, torch_cuda):
        reason = f"its driver knows CUDA {dotted(gpu.cuda)}, PyTorch is built for {torch_cuda}"
        return Lacking(reason, newer_driver(torch_cuda))
    if importlib.util.find_spec("triton") is None:
        return Lacking("Triton, which comes with PyTorch's CUDA builds, is not installed", "pip install triton")
    return compiler.lacking()


def is_old(cuda: int | None, torch_cuda: str | None) -> bool:
    """Whether a driver that knows this CUDA, 1000 * major + 10 * minor, is too old for a PyTorch that is built for
    torch_cuda. Within one major version older drivers will do (CUDA Compatibility, "Minor Version Compatibility").
    None or 0: it is not known, and False.
    """
    return bool(cuda) and torch_cuda is not None and (cuda or 0) // 1000 < _major(torch_cuda)


def newer_driver(torch_cuda: str | None) -> str:
    """What helps where the driver is too old."""
    first = FIRST_DRIVERS.get(_major(torch_cuda or "0"))
    return f"update the NVIDIA driver to {first} or newer, then restart" if first else "update the NVIDIA driver"


def dotted(cuda: int) -> str:
    """CUDA's version in its usual form."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def refuse_at_once(config: EngineConfig) -> None:
    """What a start without a GPU would refuse after seconds, in the same words, where a look tells that there is none.

    Raises ConfigError. Nothing is asked where there may be a GPU: the start itself does that, beside other work.
    """
    if config.device == "cpu":
        refuse_without_gpu(config, "--device cpu was given")
    if config.device not in ("auto", "cuda") or (config.device == "auto" and needs_gpu(config) is None):
        return
    if not may_be_there() and isinstance(found := probe(), NoGpu):
        refuse_without_gpu(config, choose_device(config.device, found, None).reason)


def may_be_there() -> bool:
    """A look that asks no driver; False where there is no GPU for certain."""
    return any(Path(node).exists() for node in DEVICE_NODES)


def needs_gpu(config: EngineConfig) -> str | None:
    """The setting that only a GPU gives a meaning to, as a flag is named; None without any."""
    if config.moe_backend not in ("auto", "cpu"):
        return f"moe_backend {config.moe_backend}"
    others = ("memory_ratio", *CACHE_SIZES, "moe_cpu_threads")
    return next((name for name in others if getattr(config, name) is not None), None)


def refuse_without_gpu(config: EngineConfig, reason: str) -> None:
    """Raises ConfigError for settings that only a GPU gives a meaning to. reason: why there is none, a clause."""
    given = needs_gpu(config)
    if given is not None:
        what = f"--{given.replace('_', '-')}"
        plain = f"ft serve --model {shlex.quote(config.model_dir)}"
        next_step = f"{plain} --device cpu" if config.device == "cpu" else plain
        raise ConfigError(f"{what} needs a GPU, and no GPU is used here: {reason}", next_step)


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """call's result or exception; ConfigError if it takes longer. It then goes on in a thread that nobody waits for."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="driver", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise ConfigError(f"{what} takes over {seconds:g} s: the NVIDIA driver does not answer", ON_CPU)
    (found,) = outcome
    if isinstance(found, BaseException):
        raise found
    return found


def _no_gpu(answer: bytes) -> NoGpu:
    try:
        return msgspec.json.decode(answer, type=NoGpu)
    except msgspec.DecodeError:
        return NoGpu("the NVIDIA driver gives no sensible answer")


def _leave(child: subprocess.Popen[bytes]) -> None:
    """Killed, but not waited for: inside a driver's call a process may not even die."""
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    threading.Thread(target=child.wait, name="reap-driver", daemon=True).start()
