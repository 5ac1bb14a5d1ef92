"""Where compiled kernels, their tuning and measurements of this machine are kept between starts. Torch-free."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """FT_HOME/cache where that is set, else the user's cache directory for ftlaunch; not made by asking for it."""
    home = os.environ.get("FT_HOME")
    if home:
        return Path(home).expanduser().absolute() / "cache"
    import platformdirs

    return platformdirs.user_cache_path("ftlaunch", appauthor=False)


def use_kernel_cache() -> Path:
    """The folder of Triton's cache, made for this user alone and set in the environment; before Triton is imported.

    A TRITON_CACHE_DIR that is set already stays. Where nothing can be written, a temporary folder serves this start.
    """
    given = os.environ.get("TRITON_CACHE_DIR")
    if given:
        return Path(given)
    folder = cache_folder() / "triton"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written to")
    except OSError as error:
        log.warning("%s: %s; kernels are compiled again at every start", folder, error.strerror)
        folder = Path(tempfile.mkdtemp(prefix="ft-kernels-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return folder
