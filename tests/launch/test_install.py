"""Installing a missing agent. npm itself is a double here: it lays down what the real one would, or fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.launch.install import obtain
from ftlaunch.launch.request import Talk
from ftproviders import PROVIDERS

NPM = """#!/bin/sh
echo "$@" >> "$NPM_LOG"
modules="$3/node_modules"
mkdir -p "$modules/.bin"
[ -n "$NPM_FAILS" ] && { echo "npm error code E404" >&2; exit 1; }
for package in "$@"; do
  case "$package" in
    node@*) printf '#!/bin/sh\\necho v24.21.0\\n' > "$modules/.bin/node"; chmod +x "$modules/.bin/node"; continue;;
    *claude-code@*) name=claude;; *codex@*) name=codex;; opencode-ai@*) name=opencode;; openclaw@*) name=openclaw;;
    *) continue;;
  esac
  echo 'true' > "$modules/$name.mjs"
  chmod +x "$modules/$name.mjs"
  ln -sf "../$name.mjs" "$modules/.bin/$name"
done
"""


class Machine:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "npm.log"
        self.home = folder / "ft"
        self.said: list[str] = []
        self.asked: list[str] = []
        self.answer = True
        self.environ = {"PATH": f"{self.bin}:/usr/bin:/bin", "NPM_LOG": str(self.log), "HOME": str(folder)}
        monkeypatch.setenv("FT_HOME", str(self.home))

    def add_npm(self) -> None:
        (self.bin / "npm").write_text(NPM)
        (self.bin / "npm").chmod(0o755)

    def talk(self) -> Talk:
        def confirm(question: str) -> bool:
            self.asked.append(question)
            return self.answer

        def progress() -> None:
            raise AssertionError("npm has no progress to show")

        return Talk(self.said.append, progress, confirm)  # type: ignore[arg-type]

    def obtain(self, agent: str) -> tuple[str, ...]:
        return obtain(PROVIDERS[agent], self.environ, self.talk()).command


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, monkeypatch)
    made.add_npm()
    # Only what a shell needs: real agents or another npm on this machine's PATH are not to be found.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "mkdir", "chmod", "ln"):
        found = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True).stdout.strip()
        if found.startswith("/"):
            (tools / name).symlink_to(found)
    made.environ["PATH"] = f"{made.bin}:{tools}"
    return made


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_is_installed_into_our_folder_after_asking(agent: str, machine: Machine) -> None:
    command = machine.obtain(agent)
    assert command == (str(machine.home / "agents" / agent / "npm" / "node_modules" / ".bin" / agent),)
    assert len(machine.asked) == 1
    assert PROVIDERS[agent].npm.spec in machine.asked[0]
    assert "-g" not in machine.log.read_text().split()
    assert machine.obtain(agent) == command
    assert len(machine.asked) == 1
    assert {path.name for path in (machine.home / "agents" / agent).iterdir()} == {"npm", "npm.lock"}


def test_openclaw_brings_its_node_first(machine: Machine) -> None:
    command = machine.obtain("openclaw")
    assert [Path(part).name for part in command] == ["node", "openclaw"]
    first, second = machine.log.read_text().splitlines()
    assert first.endswith("node@24")
    assert second.endswith(PROVIDERS["openclaw"].npm.spec)


def test_refusal_tells_the_command(machine: Machine) -> None:
    machine.answer = False
    with pytest.raises(FtError) as caught:
        machine.obtain("codex")
    assert "ft launch codex --yes" in caught.value.next_step
    assert "npm install --prefix" in caught.value.next_step
    assert not machine.log.exists()
    assert not (machine.home / "agents" / "codex" / "npm").exists()


def test_no_npm(machine: Machine) -> None:
    (machine.bin / "npm").unlink()
    with pytest.raises(FtError, match="npm") as caught:
        machine.obtain("claude")
    assert "Node.js" in caught.value.next_step
    assert machine.asked == []


def test_failed_install_leaves_nothing_and_can_be_repeated(machine: Machine) -> None:
    machine.environ["NPM_FAILS"] = "1"
    with pytest.raises(FtError, match="E404"):
        machine.obtain("claude")
    assert {path.name for path in (machine.home / "agents" / "claude").iterdir()} == {"npm.lock"}
    del machine.environ["NPM_FAILS"]
    assert os.access(machine.obtain("claude")[0], os.X_OK)
