"""Whether Triton finds what it compiles with while a server runs: a C compiler and Python's headers. Torch-free.

Its kernels need neither, but for the driver and for each kind of launch it makes a small library in C, and keeps it in
its cache (triton/backends/nvidia/driver.py and runtime/build.py, Triton 3.6). A cache that has what was launched before
is no substitute: other settings launch other kernels.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

COMPILERS = ("gcc", "clang")  # looked for in PATH where CC is not set
HEADER = "Python.h"
INSTALL = "sudo apt install gcc python3-dev, or your distribution's packages of that kind"


class Lacking(NamedTuple):
    """reason: a clause; mend: what to do about it, empty where only this machine's owner knows."""

    reason: str
    mend: str


def lacking(environ: Mapping[str, str] | None = None, include: Path | None = None) -> Lacking | None:
    """None where all is there. environ: the process's, where none is given; include: of Python's headers, likewise."""
    environ = os.environ if environ is None else environ
    named = environ.get("CC")
    if named is not None and shutil.which(named, path=environ.get("PATH")) is None:
        return Lacking(
            f"Triton compiles with CC, which is {named!r}: no such program", "unset CC, or name a C compiler"
        )
    if named is None and not any(shutil.which(name, path=environ.get("PATH")) for name in COMPILERS):
        return Lacking("Triton finds no C compiler, gcc or clang", INSTALL)
    told = os.pathsep.join(environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))  # by gcc and clang
    folders = [include or _include(), *map(Path, filter(None, told.split(os.pathsep)))]
    if not any((folder / HEADER).is_file() for folder in folders):
        return Lacking(f"Triton compiles with Python's headers, and {folders[0]} has no {HEADER}", INSTALL)
    return None


def _include() -> Path:
    """As Triton asks for it: where the system's Python installs packages for all, its headers are not."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
