"""SmolLM2 from the Hugging Face Hub, or from its cache on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ftengine.errors import FtError
from ftlaunch.store.files import sha256
from ftlaunch.store.progress import Message, Progress, watched

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = ("config.json", "tokenizer.json", "model.safetensors")
CONNECT_SECONDS = 5.0


def fetch(on_progress: Progress, on_message: Message) -> tuple[Path, str] | None:
    """The model's directory in the Hub's cache, with all FILES in it, and its revision; None: not to be had there.

    Raises FtError when what came is not what the Hub announced.
    """
    try:
        return _cached() or _download(on_progress)
    except FtError:
        raise
    except Exception as error:  # the client's errors differ between its releases; each means: not from there
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        on_message(f"The Hugging Face Hub cannot be used here ({reason[0]})")
        return None


def _cached() -> tuple[Path, str] | None:
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(REPOSITORY, name) for name in FILES]
    folders = {Path(path).parent for path in found if isinstance(path, str)}
    if len(folders) != 1 or not all(isinstance(path, str) for path in found):
        return None
    folder = folders.pop()
    return folder, folder.name


def _download(on_progress: Progress) -> tuple[Path, str]:
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    info = HfApi().model_info(REPOSITORY, timeout=CONNECT_SECONDS, files_metadata=True)
    disable_progress_bars()
    cache = Path(constants.HF_HUB_CACHE) / f"models--{REPOSITORY.replace('/', '--')}"
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if file.rfilename in FILES}
    with watched(cache, max(1, sum(sizes.values())), "Fetching SmolLM2-135M-Instruct", on_progress):
        for name in FILES:
            # The branch, not the commit: only so does the cache remember what a later look-up without network asks for.
            path = Path(hf_hub_download(REPOSITORY, name, etag_timeout=CONNECT_SECONDS))
            _check(path, name, info)
    return path.parent, path.parent.name


def _check(path: Path, name: str, info: ModelInfo) -> None:
    for file in info.siblings or ():
        if file.rfilename == name and file.lfs is not None and sha256(path) != file.lfs.sha256:
            os.unlink(path.resolve())  # noqa: PTH108 - the cached content itself, or the next pull would take it
            raise FtError(f"{name} of {REPOSITORY} arrived damaged", "ft pull demo")
