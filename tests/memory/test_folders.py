"""Where compiled kernels are kept, against folders that can and cannot be written to."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ftengine.errors import ConfigError
from ftengine.memory.folders import cache_folder, use_kernel_cache


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An FT_HOME that is a file, so that no user can make folders in it; and no folder of kernels is set."""
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.setenv("FT_HOME", str(home))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    return home


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    assert use_kernel_cache() == cache_folder() / "triton" == Path(os.environ["TRITON_CACHE_DIR"])
    assert (tmp_path / "cache" / "triton").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert use_kernel_cache() == tmp_path / "mine"


def test_a_temporary_folder_goes_with_its_process(blocked: Path, tmp_path: Path) -> None:
    script = "from ftengine.memory.folders import use_kernel_cache; folder = use_kernel_cache(); print(folder.is_dir())"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"
    assert "kernels are compiled again at every start" in ended.stderr
    assert list(tmp_path.iterdir()) == [blocked]


def test_where_nothing_can_be_written(
    blocked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(blocked / "tmp"))
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="compiled kernels cannot be kept") as told:
        use_kernel_cache()
    assert "TRITON_CACHE_DIR" in told.value.next_step
