"""`--dry-run` prints all of it and touches nothing: the trees before and after are compared, and processes counted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ftlaunch.launch import dry
from ftlaunch.launch.request import LaunchRequest
from tests.launch.place import AGENTS, Place, tree
from tests.support.serving import FT, SCRIPTED_CHECKPOINT, RunningServer

MODEL = ("--model", str(SCRIPTED_CHECKPOINT))


@pytest.mark.parametrize("agent", AGENTS)
def test_touches_nothing(agent: str, place: Place) -> None:
    before = tree(place.home.parent)
    done = place.run("launch", agent, "--dry-run", *MODEL, "--", "-p", "hi", OPENAI_API_KEY="sk-user")
    assert done.returncode == 0, done.stderr
    assert tree(place.home.parent) == before
    assert not place.ft_home.exists()
    assert "OPENAI_API_KEY" in done.stdout
    assert "sk-user" not in done.stdout
    assert "Would start a server" in done.stdout
    for heading in ("Environment set", "Environment removed", "Files", "Command", "Notes"):
        assert heading in done.stdout


def test_is_what_a_launch_then_does(place: Place, server: RunningServer) -> None:
    place.environment["OTEL_EXPORTER"] = "x"
    arguments = ("launch", "claude", "--server", server.url, "--", "-p", "hi")
    planned = json.loads(place.run(*arguments[:2], "--dry-run", "--json", *arguments[2:]).stdout)
    assert place.run(*arguments).returncode == 0
    seen = place.seen()
    assert planned["command"][1:] == seen["argv"]
    assert planned["env_removed"] == ["OTEL_EXPORTER"]
    assert planned["env_set"].items() <= seen["environment"].items()
    added = seen["environment"].keys() - place.environment.keys() - planned["env_set"].keys()
    assert added <= {"FT_LAUNCH_AGENT", "PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE"}  # the others are /bin/sh's


def test_secrets_are_masked(place: Place, server: RunningServer) -> None:
    users = json.dumps({"provider": {"mine": {"options": {"apiKey": "sk-in-json"}}}})
    for agent in AGENTS:
        done = place.run(
            "launch", agent, "--dry-run", "--json", "--server", server.url,
            FT_API_KEY="key-of-mine", OPENCODE_CONFIG_CONTENT=users,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "key-of-mine" not in done.stdout
        assert "sk-in-json" not in done.stdout


@pytest.mark.parametrize(
    ("agent", "arguments", "said"),
    [
        ("claude", ("--model", "demo"), "ft pull demo"),
        ("claude", (), "ft pull demo"),
        ("claude", (*MODEL, "--context", "8192"), "lean form"),
        ("codex", (*MODEL, "--strip", "all"), "AWS_PROFILE"),
    ],
)
def test_says(agent: str, arguments: tuple[str, ...], said: str, place: Place) -> None:
    done = place.run("launch", agent, "--dry-run", *arguments, AWS_PROFILE="work")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_missing_agent_is_said_and_not_installed(place: Place) -> None:
    (place.bin / "codex").unlink()
    done = place.run("launch", "codex", "--dry-run", *MODEL, PATH=f"{place.bin}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "npm install --prefix" in done.stdout
    assert not place.ft_home.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--model", "nope"), "nope"), ((*MODEL, "--context", "1000"), "11,900")],
)
def test_refuses_what_a_launch_refuses(arguments: tuple[str, ...], said: str, place: Place) -> None:
    done = place.run("launch", "claude", "--dry-run", *arguments)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("gpu", "found", "shown"), [(True, 262_144, 32_768), (False, 262_144, 131_072), (False, 4096, 4096)]
)
def test_the_context_that_is_shown_is_what_a_server_takes_by_default(
    gpu: bool, found: int, shown: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the model was made for; with a GPU, as docs/gpu.md says."""
    monkeypatch.setattr(dry, "may_be_there", lambda: gpu)
    monkeypatch.setattr(dry, "context_on_disk", lambda model: found)
    notes: list[str] = []
    request = LaunchRequest("claude", tmp_path, {})
    assert dry._future(str(SCRIPTED_CHECKPOINT), request, notes).context_window == shown
    assert notes[-1] == f"The server decides on its context when it starts; {shown:,} tokens are shown"
    asked = LaunchRequest("claude", tmp_path, {}, context=50_000)
    assert dry._future(str(SCRIPTED_CHECKPOINT), asked, notes).context_window == 50_000


def test_a_removed_working_directory_is_said(place: Place, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'cd "$1" && rmdir "$1" && exec "$0" -m ftlaunch launch claude --dry-run'
    done = subprocess.run(
        ["/bin/sh", "-c", command, FT[0], str(gone)],
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "the folder that this shell is in was removed" in done.stderr
