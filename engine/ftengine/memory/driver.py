"""Asks the CUDA driver for its first GPU and prints the answer as JSON: a program of its own, run by memory/gpu.py.

A driver that is out of order may never return from a call, and a process that waits for it cannot be ended; so this is
not done in the engine. On Linux it ends with whoever asked, so that a driver that hangs keeps nothing running. Needs
the standard library only. The answer: {"name", "capability", "total", "free", "cuda", "count"}, or {"reason"} in a few
words.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from typing import Any

LIBRARY = "libcuda.so.1"
CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR; cuda.h
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class DriverError(Exception):
    pass


class Driver:
    """The driver's own library, the same that torch and Triton use."""

    def __init__(self) -> None:
        """Raises DriverError."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise DriverError(f"no NVIDIA driver is installed ({LIBRARY} is not found)") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises DriverError with the driver's own words."""
        try:
            status = int(getattr(self._library, name)(*arguments))
        except AttributeError:
            raise DriverError(f"the NVIDIA driver is too old: it has no {name}") from None
        if status == NO_DEVICE:
            raise DriverError("the NVIDIA driver shows no GPU here")
        if status:
            raise DriverError(f"the NVIDIA driver fails: {name}: {self._words(status)}")

    def number(self, name: str, *arguments: Any) -> int:
        """Of a function that writes an int to the address it gets first."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def _words(self, status: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value is not None
        return f"{text.value.decode(errors='replace')} ({status})" if known and text.value else f"error {status}"


def ask() -> dict[str, Any]:
    """Of the first GPU that CUDA_VISIBLE_DEVICES leaves. Raises DriverError.

    The free memory is told with a context in place, as the engine will have one: several hundred MB are gone with it.
    """
    driver = Driver()
    count = driver.number("cuDeviceGetCount")
    if not count:
        raise DriverError("the NVIDIA driver shows no GPU here")
    device = driver.number("cuDeviceGet", 0)
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), device)
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return {
        "name": name.value.decode(errors="replace"),
        "capability": [driver.number("cuDeviceGetAttribute", attribute, device) for attribute in CAPABILITY],
        "total": total.value,
        "free": free.value,
        "cuda": driver.number("cuDriverGetVersion"),
        "count": count,
    }


def end_with_parent() -> None:
    """Also inside a call that does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main() -> None:
    end_with_parent()
    try:
        answer = ask()
    except DriverError as error:
        answer = {"reason": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
