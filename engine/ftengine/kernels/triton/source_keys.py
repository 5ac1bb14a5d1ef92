"""Triton's key of a kernel's source, the same in whatever order kernels are first launched.

The key is a sum over the source, the keys of the functions that it calls, and the constants that all of them use. Of a
called function Triton takes the constants that it knows so far, none if nobody has asked for that function's key yet,
so which kernels were launched before decides, too: a start that measures the lanes first, as only the first one on a
machine does, has other keys than the next one, which then compiles again what lies on the disk. Here a called function
gets its key before its constants are taken.

Triton's inner parts are at work here (3.6: DependenciesFinder, JITCallable). Where they are others, keys stay as they
are, which costs only time.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton.runtime import jit

log = logging.getLogger("ftengine.source_keys")

_settled = False


def settle() -> None:
    """From now on, in this process. Before any kernel is launched."""
    global _settled
    try:
        if _settled:
            return
        take_constants = jit.DependenciesFinder._update_hash

        def called_first(self: Any, function: Any) -> None:
            _key(function)
            take_constants(self, function)

        setattr(jit.DependenciesFinder, "_update_hash", called_first)  # noqa: B010  mypy refuses the assignment
        _settled = True
    except Exception:
        log.debug("keys of kernels depend on the order of their launches", exc_info=True)


def read_sources(packages: Sequence[str]) -> int:
    """Asks for the keys of all kernels in imported modules of these packages; for a thread beside other work.

    Returns how many there are. What fails is left to the kernel's launch.
    """
    count = 0
    with _no_collections():
        for function in _functions(packages):
            try:
                _key(function)
                count += 1
            except Exception:
                log.debug("no key ahead of %s", function, exc_info=True)
    return count


def _key(function: Any) -> str:
    try:
        return str(function.cache_key)
    except BaseException:
        function.hash = None  # Triton leaves a placeholder, which says nothing of the source
        raise


@contextmanager
def _no_collections() -> Iterator[None]:
    """Until 3.11.7 and 3.12.1 two threads that parse fail if the garbage collector calls Python in one of them
    (https://github.com/python/cpython/issues/106905), and the other one may be at a launch."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _functions(packages: Sequence[str]) -> Iterator[Any]:
    """Functions of kernels, whatever tunes them taken off."""
    for name, module in list(sys.modules.items()):
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            for value in list(vars(module).values()):
                while not isinstance(value, jit.JITCallable) and isinstance(value, jit.KernelInterface):
                    value = getattr(value, "fn", None)
                if isinstance(value, jit.JITCallable):
                    yield value
