"""What the scripts ask of a machine before they change anything, with programs that tests put into its PATH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ftlaunch.machine.agents import OLDEST

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("bash", "basename", "cat", "cksum", "dirname")  # that the scripts themselves use


@pytest.fixture
def demo(tmp_path: Path):
    """Runs the demo's script where it is alone: no environment, and no Python to make one with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PLAIN:
        (programs / name).symlink_to(shutil.which(name) or "")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")

    def run(**others: str) -> subprocess.CompletedProcess[str]:
        for name, script in others.items():
            (programs / name).write_text(f"#!{programs / 'bash'}\n{script}\n")
            (programs / name).chmod(0o755)
        command = [str(programs / "bash"), str(tmp_path / "scripts" / "demo.sh")]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, env={"PATH": str(programs)})

    return run


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ("v18.19.1", True),
        (f"v{OLDEST - 1}.9.0", True),
        (f"v{OLDEST}.0.0", False),
        ("v08.1.0", True),
        ("v100.0.0", False),
        ("something else", False),
    ],
)
def test_an_old_node_is_told_of_first(node: str, told: bool, demo) -> None:
    """As `ft doctor` judges it; and then what is missing next stops the script."""
    done = demo(npm="echo 10", node=f"echo {node}")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert "Python 3.10 or newer is missing" in lines[-1]
    expected = f"demo.sh: Node is {node.removeprefix('v')}; newer releases of the agents may not start. "
    assert [line.startswith(expected) for line in lines[:-1]] == [True] * told
    assert all(f"Install Node {OLDEST} or newer" in line for line in lines[:-1])


@pytest.mark.parametrize("programs", [{}, {"npm": "echo 10"}, {"npm": "echo 10", "node": "exit 1"}])
def test_without_node_the_demo_ends_there(programs: dict[str, str], demo) -> None:
    done = demo(**programs)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("demo.sh: npm is ")
    assert f"Install Node {OLDEST} or newer" in line
