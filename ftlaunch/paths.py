"""Where ft keeps its files. FT_HOME, when set, stands for the user's data directory, and FT_HOME/cache for their cache.

models/<name>/       complete models (models/.partial-<name>-… while one is built)
run/servers/         one record per running server
run/logs/            logs of servers started in the background
run/leases/<id>/     launches that use a server
run/key              the key of servers started in the background
agents/              files that launch hands to agents

prompts/             in the cache: what servers keep of prompts, for their next start
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The root of everything below; not created by asking for it."""
    chosen = os.environ.get("FT_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_data_path("ftlaunch", appauthor=False)


def models() -> Path:
    return home() / "models"


def run() -> Path:
    return home() / "run"


def servers() -> Path:
    return run() / "servers"


def logs() -> Path:
    return run() / "logs"


def leases(server_id: str) -> Path:
    return run() / "leases" / server_id


def agents() -> Path:
    return home() / "agents"


def prompts() -> Path:
    from ftengine.memory.folders import cache_folder

    return cache_folder() / "prompts"


def private(directory: Path) -> Path:
    """The directory, made if need be, that only its owner can enter."""
    from ftengine.private import private_folder

    return private_folder(directory)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read; it is whole or as it was before. Its folder is made if need be."""
    from ftengine.atomic import write_atomically

    private(path.parent)
    write_atomically(path, text.encode(), mode=0o600)
