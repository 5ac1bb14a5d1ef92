"""What Triton compiles with while a server runs: what is said to be lacking against Triton's own attempt."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from ftengine.errors import ConfigError
from ftengine.memory import compiler
from ftengine.memory.gpu import Gpu, choose_device, unusable

SOURCE = "#include <Python.h>\nint answer(void) { return PY_VERSION_HEX; }\n"
CARD = Gpu("Fake 4060", (8, 9), 8 << 30, 7 << 30, 13000, 1)


def triton_compiles(folder: Path) -> bool:
    build = pytest.importorskip("triton.runtime.build", reason="there is no Triton for this system")
    if (found := getattr(build, "_find_compiler", None)) is not None:
        found.cache_clear()  # Triton 3.8 keeps what it found
    (folder / "answer.c").write_text(SOURCE)
    try:
        return Path(build._build("answer", str(folder / "answer.c"), str(folder), [], [], [], [])).exists()
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        return False


@pytest.fixture(params=["as it is", "no compiler", "CC is missing", "no headers"])
def lacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Words of the reason that is to be given; empty where nothing is to be missing."""
    monkeypatch.delenv("CPATH", raising=False)
    if request.param == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        return "no C compiler, gcc or clang"
    if request.param == "CC is missing":
        monkeypatch.setenv("CC", "no-such-compiler")
        return "CC, which is 'no-such-compiler': no such program"
    if request.param == "no headers":
        monkeypatch.setattr(sysconfig, "get_paths", lambda *args, **kwargs: {"include": str(tmp_path)})
        return f"{tmp_path} has no Python.h"
    return ""


def test_what_is_missing_is_what_triton_fails_for(lacks: str, tmp_path: Path) -> None:
    found = compiler.lacking()
    if not lacks and found is not None:
        pytest.skip(found.reason)
    assert (found is None) == triton_compiles(tmp_path) == (not lacks)
    assert lacks in (found.reason if found is not None else "")


def test_headers_that_the_compiler_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    told = {"PATH": "/nowhere", "CC": "/bin/sh", "CPATH": str(tmp_path)}
    assert compiler.lacking(told, tmp_path / "empty") is None
    assert compiler.lacking({**told, "CPATH": ""}, tmp_path / "empty") is not None


def test_a_gpu_without_a_compiler_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unusable(CARD, "13.0") == ("Triton finds no C compiler, gcc or clang", compiler.INSTALL)
    chosen = choose_device("auto", CARD, "13.0")
    assert chosen.value == "cpu"
    assert chosen.reason.startswith("Triton finds no C compiler, gcc or clang; sudo apt install gcc python3-dev")
    with pytest.raises(ConfigError, match="no GPU here: Triton finds no C compiler") as error:
        choose_device("cuda", CARD, "13.0")
    assert "sudo apt install gcc python3-dev" in error.value.next_step
    assert error.value.next_step.endswith("until then ft serve --device cpu")
