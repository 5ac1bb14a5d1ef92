"""What a launch is asked for, and how it speaks to the person who asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Talk:
    """The way to the person. `confirm` answers False where nobody can be asked."""

    say: Callable[[str], None]
    progress: Callable[[], AbstractContextManager[Progress]]
    confirm: Callable[[str], bool]


@dataclass(frozen=True)
class LaunchRequest:
    agent: str
    directory: Path
    environ: Mapping[str, str]
    user_args: tuple[str, ...] = ()
    model: str | None = None
    server: str | None = None  # URL of a server that somebody else runs
    context: int | None = None  # tokens
    cache_device: int | None = None  # bytes, of a server that is started; so are the next two
    cache_host: int | None = None
    cache_disk: int | None = None
    lean: bool = False
    isolated: bool = False
    strip_all: bool = False
    keep: bool = False  # leave the server running
    interactive: bool = True
