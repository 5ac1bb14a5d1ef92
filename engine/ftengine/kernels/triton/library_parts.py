"""Imports modules of a library without what its packages import besides.

`import fla.ops` brings every operation of fla-core, and its decorators bring torch's compiler: three seconds of a
start, while the kernels that are used here need a tenth of one. So the packages on the way to a module are put in place
empty, and `torch.compiler.disable`, which only says what that compiler must leave alone, does nothing meanwhile.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


@contextmanager
def only_parts_of(library: str, packages: Sequence[str]) -> Iterator[None]:
    """Inside, `packages` of the library (names below its own) are folders of modules and run no code of their own.

    They stay so in this process; where one of them has been imported already, everything is as usual. Raises
    ImportError if the library is not installed.
    """
    names = [f"{library}.{package}" for package in packages]
    if any(name in sys.modules for name in names):
        yield
        return
    root = importlib.import_module(library)
    added = {name: _folder(root, name) for name in names}
    sys.modules.update(added)
    disable = torch.compiler.disable
    _replace(_as_it_is)
    try:
        yield
    except BaseException:
        for name in added:
            sys.modules.pop(name, None)
        raise
    finally:
        _replace(disable)


def _folder(root: ModuleType, name: str) -> ModuleType:
    package = ModuleType(name)
    below = name.split(".")[1:]
    package.__path__ = ["/".join((path, *below)) for path in root.__path__]
    return package


def _as_it_is(function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """torch.compiler.disable as a decorator with and without arguments."""
    return (lambda inner: inner) if function is None else function


def _replace(disable: Callable[..., Any]) -> None:
    setattr(torch.compiler, "disable", disable)  # noqa: B010  mypy refuses the assignment
