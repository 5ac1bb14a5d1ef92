"""Where compiled kernels, their tuning and measurements of this machine are kept between starts. Torch-free."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

from ftengine.errors import ConfigError
from ftengine.private import private_folder

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

    A TRITON_CACHE_DIR that is set already stays. Where nothing can be written, a temporary folder serves this process
    and is removed at its end. Raises ConfigError where that cannot be made either.
    """
    given = os.environ.get("TRITON_CACHE_DIR")
    if given:
        return Path(given)
    folder = cache_folder() / "triton"
    try:
        private_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written to")
    except OSError as error:
        log.warning("%s: %s; kernels are compiled again at every start", folder, error.strerror)
        folder = _temporary_folder()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return folder


def _temporary_folder() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="ft-kernels-"))
    except OSError as error:
        raise ConfigError(
            f"compiled kernels cannot be kept anywhere, not even in a temporary folder: {error.strerror}",
            "TRITON_CACHE_DIR=/a/folder/of/yours ft serve",
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
