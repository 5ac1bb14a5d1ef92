"""Writing a plan's files: under ft's own folder only, private, and never half."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ftlaunch import paths
from ftproviders import AgentPlan


def write(plan: AgentPlan) -> None:
    """Raises OSError when the folder cannot be written, ValueError for a path outside of it."""
    _write_all(plan.files)
    _write_all({path: text for path, text in plan.seeds.items() if not path.exists()})


def _write_all(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        path.relative_to(paths.agents())
        paths.write_private(path, text)
