"""Folders that only this user can enter, made with every folder above them that is missing."""

from __future__ import annotations

from pathlib import Path

MODE = 0o700


def private_folder(folder: Path) -> Path:
    """The folder. What is made has mode 0700 whatever the umask; what was there stays as it is. Raises OSError.

    `Path.mkdir(mode, parents=True)` would give the mode to the last folder alone, and less of it under some umasks.
    """
    missing = []
    for path in (folder, *folder.parents):
        if path.exists():
            break
        missing.append(path)
    for path in reversed(missing):
        try:
            path.mkdir(MODE)
        except FileExistsError:  # another process was faster
            continue
        path.chmod(MODE)
    folder.mkdir(MODE, exist_ok=True)  # refuses what is there and no folder
    return folder
