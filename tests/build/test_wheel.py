"""A wheel built the way pip builds it, installed by itself: everything in it, nothing else, and it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "ftlaunch": ROOT / "ftlaunch",
    "ftproviders": ROOT / "providers/ftproviders",
    "ftengine": ROOT / "engine/ftengine",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(pip, check=True, timeout=280)
    (path,) = folder.glob("ftlaunch-*.whl")
    return path


@pytest.mark.slow
def test_holds_every_file_of_the_packages_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    native = {name for name in names if name.startswith("ftengine/_native.") and not name.endswith(".pyi")}
    assert len(native) == 1
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged - native == files
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"ftengine/py.typed", "ftlaunch/py.typed", "ftproviders/py.typed"} <= names


@pytest.mark.slow
def test_abi_is_the_stable_one_where_python_has_it(wheel):
    tag = wheel.stem.split("-")[-3:-1]
    version = f"cp3{sys.version_info.minor}"
    assert tag == (["cp312", "abi3"] if sys.version_info >= (3, 12) else [version, version])


@pytest.mark.slow
def test_runs_from_any_folder(wheel, tmp_path):
    """Even where a folder called `engine` and a module `ftlaunch.py` lie: installed scripts do not look there."""
    place = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run(pip, check=True, timeout=120)
    work = tmp_path / "work"
    (work / "engine").mkdir(parents=True)
    (work / "engine" / "__init__.py").write_text("raise RuntimeError('not this one')")
    code = (
        "import ftengine._native, ftengine.kernels.native as native, ftlaunch, ftproviders\n"
        f"assert ftlaunch.__file__.startswith({str(place)!r}), ftlaunch.__file__\n"
        "assert native.AVAILABLE, native.REASON"
    )
    # -S: without the .pth files of this environment, which lead to the sources where the project is installed in place
    python = [sys.executable, "-S"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), sysconfig.get_path("purelib")])}
    subprocess.run([*python, "-c", code], cwd=work, env=environment, check=True, timeout=60)
    help_text = subprocess.run(
        [*python, str(place / "bin" / "ft"), "--help"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "launch" in help_text.stdout, help_text.stderr
