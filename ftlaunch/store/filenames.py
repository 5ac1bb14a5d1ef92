"""Which names from a stranger's list may become files here, and which paths of this machine models are served from."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from ftengine.errors import FtError

MAX_BYTES = 255  # of one part, in UTF-8: what the usual file systems hold
MAX_PARTS = 8
# Devices on Windows in any folder, with any ending: a store on a Windows disk (WSL2's /mnt/c) must not open them.
DEVICES = ("con", "prn", "aux", "nul", "com", "lpt")
RESERVED = {device + digit for device in DEVICES for digit in ("", *"0123456789\u00b9\u00b2\u00b3")}


def is_safe(name: str) -> bool:
    """A relative path of plain parts with `/` between them, the same to every file system and to the eye."""
    parts = name.split("/")
    return len(parts) <= MAX_PARTS and all(is_safe_part(part) for part in parts)


def is_safe_part(part: str) -> bool:
    folded = unicodedata.normalize("NFKC", part)  # what a fullwidth dot or a one-character `..` would become
    if part != unicodedata.normalize("NFC", part) or not part.isprintable():
        return False
    return all(_plain(form) for form in (part, folded)) and not part.startswith((".", " ", "~"))


def _plain(part: str) -> bool:
    try:
        length = len(part.encode("utf-8"))
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return (
        0 < length <= MAX_BYTES
        and ".." not in part
        and not part.endswith((".", " "))
        and not any(character in part for character in '/\\:*?"<>|\0')
        and part.partition(".")[0].rstrip().lower() not in RESERVED
    )


def clash(names: Iterable[str]) -> str | None:
    """A name that some file systems cannot tell from another one of these; None when all differ."""
    seen: set[str] = set()
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        if folded in seen:
            return name
        seen.add(folded)
    return None


def shown(name: str) -> str:
    """A name for a person's terminal, harmless and short. What came in bytes of another encoding is read as UTF-8, and
    what that does not explain is no letter.
    """
    if any("\udc80" <= character <= "\udcff" for character in name):
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return name if 0 < len(name) <= 100 and name.isprintable() else f"{name[:40]!a}"


def check_path(path: Path, rename: str) -> None:
    """Raises FtError where no model could be served from there: a path is text in records, settings and libraries.

    rename: what to do if it is no text whatever the settings.
    """
    try:
        str(path).encode()
        return
    except UnicodeEncodeError:
        pass
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        reason, step = "its name is no UTF-8 text", rename
    else:
        reason, step = "names are read as ASCII with these settings", "export LC_ALL=C.UTF-8, or PYTHONUTF8=1"
    raise FtError(f"no model can be served from {shown(str(path))}: {reason}", step)
