"""Where an agent works in these tests: a user's home and a repository, both hostile, and `ft launch` run in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support import hostile
from tests.support.npm import InstalledAgents
from tests.support.script import DRAFTED_FILE, NEW, OLD
from tests.support.serving import FT, scripted_environment

PROGRAM = "import hashlib\n\nSEED = '{seed}'\n\n\ndef main():\n{line}\n\n\nmain()\n"
AGENT_TIMEOUT = 150  # seconds, on a machine that does much else


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@dataclass(frozen=True)
class Field:
    home: Path
    repository: Path
    ft_home: Path
    seed: str
    planted: dict[Path, str]  # settings files and their digests
    environment: dict[str, str]

    @property
    def hello(self) -> Path:
        return self.repository / "hello.py"

    @property
    def prompt(self) -> str:
        return f"Make {self.hello} say hello to the world and run it."

    @property
    def word(self) -> str:
        """What only a real run of the edited program can print; the script of the model does not know it."""
        return hashlib.sha256(self.seed.encode()).hexdigest()[:12]

    def launch(self, agent: str, *arguments: str, seconds: float = AGENT_TIMEOUT) -> Outcome:
        return self.run(*FT, "launch", agent, *arguments, seconds=seconds)

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.repository,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str]) -> Outcome:
        """By force, with what it has started. Returns what was printed until then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        return Outcome(process.returncode, stdout, stderr)

    def run(self, *command: str, seconds: float = AGENT_TIMEOUT) -> Outcome:
        """Raises AssertionError, with what was printed until then, when it takes longer than `seconds`."""
        process = self.start(*command)
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {seconds} s: {self.end(process)}") from None
        return Outcome(process.returncode, stdout, stderr)

    def changes(self) -> list[str]:
        """What git sees changed, as `git status --porcelain` writes it."""
        command = ["git", "status", "--porcelain", "--untracked-files=all"]
        return subprocess.run(
            command, cwd=self.repository, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    def assert_task_done(self, outcome: Outcome) -> None:
        """Listed, read, edited, run and answered: with the real output in the answer and nothing else touched."""
        assert outcome.code == 0, outcome
        assert f"Done with 4 tool results; it printed: hello, world {self.word}" in outcome.stdout, outcome
        assert self.hello.read_text() == PROGRAM.format(seed=self.seed, line=NEW)
        assert not (self.repository / DRAFTED_FILE).exists()
        assert self.changes() == [" M hello.py"]

    def assert_settings_untouched(self) -> None:
        assert hostile.digests(list(self.planted)) == self.planted


def make_field(folder: Path, cloud: str, proxy: str, agents: InstalledAgents) -> Field:
    home, repository, ft_home = folder / "home", folder / "repository", folder / "ft"
    for path in (home, repository, ft_home):
        path.mkdir()
    seed = secrets.token_hex(8)
    (repository / "hello.py").write_text(PROGRAM.format(seed=seed, line=OLD))
    planted = hostile.plant(home, repository, cloud)
    _commit_all(repository)
    known = scripted_environment(ft_home)
    environment = {
        **{name: known[name] for name in ("FT_HOME", "FT_PLUGINS", "PYTHONPATH")},
        **hostile.variables(cloud),
        "HOME": str(home),
        "PATH": f"{agents.bin}{os.pathsep}{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "HTTPS_PROXY": proxy,
        "HTTP_PROXY": proxy,
    }
    return Field(home, repository, ft_home, seed, planted, environment)


def _commit_all(repository: Path) -> None:
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "--all", "--force"],
        [
            "-c",
            "user.name=Dev",
            "-c",
            "user.email=dev@example.com",
            "-c",
            "commit.gpgsign=false",
            "commit",
            "-qm",
            "initial",
        ],
    ):
        subprocess.run(["git", *command], cwd=repository, check=True)
