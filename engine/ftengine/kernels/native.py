"""The native (C++) library: whether it is there, what it can execute, what it uses.

Imports no torch: the front and commands that do not compute ask it too.
"""

from __future__ import annotations

try:
    from ftengine import _native
except ImportError as error:
    REASON = f"the native library is not built ({error})"
    AVAILABLE = False
else:
    REASON = ""
    AVAILABLE = True


def cpu_features() -> list[str]:
    """Names of the instruction sets that processor and operating system offer; empty without the native library."""
    return _native.cpu_features() if AVAILABLE else []


def instruction_sets() -> list[str]:
    """Versions of the kernels that run here, as a rule the fastest first, always with "portable" at the end."""
    return _native.instruction_sets() if AVAILABLE else []


def kernel_choice() -> tuple[str, str]:
    """The version in use and why; the first call measures, some milliseconds. Needs the native library."""
    return _native.kernel_choice()


def use_kernels(isa: str, reason: str) -> None:
    """Uses one of `instruction_sets()` from now on. Raises ValueError for any other name. Needs the native library."""
    _native.use_kernels(isa, reason)


def granted_threads() -> int:
    """The most threads that a kernel runs on: CPUs of the affinity mask, or less where a cgroup limits CPU time."""
    return _native.granted_threads() if AVAILABLE else 1
