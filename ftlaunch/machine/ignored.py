"""Files of the cache folder that are left aside, because they are damaged or of another version: that is told once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from ftengine.experts import profile
from ftlaunch.machine import served
from ftlaunch.machine.verdict import Finding

KINDS = (
    (served.FILE_NAME, served.VERSION, "models", "what servers of this machine did is not known"),
    (profile.FILE_NAME, profile.VERSION, "lanes", "what was measured of the link and the CPU is not known"),
)


def findings(folder: Path) -> Iterator[Finding]:
    for name, version, content, cost in KINDS:
        path = folder / name
        if reason := why(path, version, content):
            data = {"path": str(path), "reason": reason}
            mend = f"rm {'-r ' if path.is_dir() else ''}{quote(str(path))}; ft writes it anew"
            yield Finding("model.ignored", "left aside", f"{path}: {reason}", "note", cost, mend, data)


def why(path: Path, version: int, content: str) -> str:
    """Why those that read it find nothing in it; empty where they do, or where it is not there."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror or error)
    except (ValueError, RecursionError):
        return "it is damaged" if path.stat().st_size else "it is empty"
    if not isinstance(found, dict) or not isinstance(found.get(content), list):
        return "it is damaged"
    given = found.get("version")
    return "" if given == version else f"it is of version {given!r}, not {version}"
