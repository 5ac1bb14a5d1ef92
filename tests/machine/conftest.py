"""Machines for probes: trees of files that say what a system would, and NVIDIA's libraries as the tests want them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ftlaunch.machine.system import System

FAKES = {
    "libcuda.so.1": Path(__file__).parents[1] / "memory" / "fake_driver.c",
    "libnvidia-ml.so.1": Path(__file__).with_name("fake_nvml.c"),
}
Tree = Callable[[Mapping[str, str | bytes]], System]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A system that consists of these files."""

    def make(files: Mapping[str, str | bytes]) -> System:
        root = tmp_path / "root"
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        root.mkdir(exist_ok=True)
        return System(root)

    return make


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a CUDA driver and a management library that obey FAKE_DRIVER and FAKE_NVML."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "g++", "c++"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("nvidia")
    for name, source in FAKES.items():
        subprocess.run([compiler, "-xc", "-shared", "-fPIC", "-o", folder / name, source], check=True)
    return folder


@pytest.fixture
def nvidia(fake_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the libraries do, in processes that are started from here on."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_libraries))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def does(nvml: str = "", cuda: str = "answers") -> None:
        monkeypatch.setenv("FAKE_NVML", nvml)
        monkeypatch.setenv("FAKE_DRIVER", cuda)

    return does


def built_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str) -> None:
    """The probe's process finds a PyTorch that is built for it: a folder that tells a version, first on the path."""
    package = tmp_path / "torch-for-cuda" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the doctor looks and does not import')")
    (package / "version.py").write_text(f"cuda: Optional[str] = '{cuda}'\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.fixture
def torch_13(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    built_for(monkeypatch, tmp_path, "13.0")
