"""Files of a plan: private, whole, inside ft's folder, and seeds only once."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ftlaunch.launch import files
from ftproviders import AgentPlan


def plan(**kinds: dict[Path, str]) -> AgentPlan:
    return AgentPlan(argv=(), env_set={}, env_remove=(), **kinds)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    return tmp_path / "agents" / "claude"


def test_files_are_private_and_replaced(folder: Path) -> None:
    path = folder / "deep" / "a.json"
    for text in ("one", "two"):
        files.write(plan(files={path: text}))
        assert path.read_text() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_seeds_belong_to_the_agent_once_they_are_there(folder: Path) -> None:
    path = folder / "home" / ".claude.json"
    files.write(plan(seeds={path: "ours"}))
    path.write_text("the agent's")
    files.write(plan(seeds={path: "ours"}))
    assert path.read_text() == "the agent's"


def test_nothing_outside_of_our_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="agents"):
        files.write(plan(files={tmp_path / "elsewhere": "x"}))
    assert not (tmp_path / "elsewhere").exists()
