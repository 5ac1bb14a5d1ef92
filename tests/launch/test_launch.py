"""`ft launch` around a double of each agent, against a real server: what the child is given and what is left."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.launch.place import AGENTS, Place, tree
from tests.launch.terminal import Terminal
from tests.support.serving import FT, RunningServer

ANTHROPIC = {"ANTHROPIC_API_KEY": "sk-user", "ANTHROPIC_BASE_URL": "http://192.0.2.1", "CLAUDE_CODE_USE_BEDROCK": "1"}


@pytest.mark.parametrize("agent", AGENTS)
def test_child_and_user_files(agent: str, place: Place, server: RunningServer) -> None:
    before = tree(place.home, place.repository)
    done = place.run("launch", agent, "--server", server.url, "--", "a", "--b", "c d", GITHUB_TOKEN="gh", **ANTHROPIC)
    assert done.returncode == 0, done.stderr
    seen = place.seen()
    assert seen["argv"][-3:] == ["a", "--b", "c d"]
    assert seen["cwd"] == str(place.repository)
    environment = seen["environment"]
    assert environment["GITHUB_TOKEN"] == "gh"
    assert "sk-user" not in environment.values()
    assert "CLAUDE_CODE_USE_BEDROCK" not in environment
    assert "http://192.0.2.1" not in environment.values()
    routed = json.dumps([seen["argv"], environment, [path.read_text() for path in place.ft_home.rglob("*.json")]])
    assert server.url in routed
    assert tree(place.home, place.repository) == before
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in place.ft_home.rglob("*") if path.is_file())


@pytest.mark.parametrize(("does", "status"), [("exit 0", 0), ("exit 7", 7), ("die 9", 137), ("die 15", 143)])
def test_exit_status_is_the_agents(does: str, status: int, place: Place, server: RunningServer) -> None:
    assert place.run("launch", "claude", "--server", server.url, DOUBLE_DOES=does).returncode == status


def test_key_of_a_server_elsewhere_comes_from_the_environment(place: Place, server: RunningServer) -> None:
    place.run("launch", "codex", "--server", server.url, FT_API_KEY="key-of-mine")
    seen = place.seen()
    assert seen["environment"]["FT_API_KEY"] == "key-of-mine"
    assert "key-of-mine" not in " ".join(seen["argv"])


@pytest.mark.parametrize(
    ("agent", "context", "lean", "said"),
    [
        ("claude", "8192", True, ("11,900", "8,192", "lean")),
        ("codex", "4096", True, ("5,300", "4,096", "lean")),
        ("codex", "8192", False, ()),
        ("opencode", "8192", False, ()),
        ("claude", "131072", False, ()),
    ],
)
def test_small_context(
    agent: str, context: str, lean: bool, said: tuple[str, ...], place: Place, server: RunningServer
) -> None:
    done = place.run("launch", agent, "--server", server.url, "--context", context)
    assert done.returncode == 0, done.stderr
    seen = place.seen()
    is_lean = "CLAUDE_CODE_SIMPLE" in seen["environment"] or "features.multi_agent=false" in seen["argv"]
    assert is_lean is lean
    assert all(part in done.stderr for part in said), done.stderr


@pytest.mark.parametrize(
    ("agent", "context", "numbers"),
    [
        ("openclaw", "8192", ("13,200", "8,192")),
        ("opencode", "8000", ("7,600", "8,000")),
        ("claude", "1200", ("11,900", "1,200")),
    ],
)
def test_too_small_context_is_refused_with_both_numbers(
    agent: str, context: str, numbers: tuple[str, str], place: Place, server: RunningServer
) -> None:
    done = place.run("launch", agent, "--server", server.url, "--context", context)
    assert done.returncode == 1
    assert all(number in done.stderr for number in numbers)
    assert not place.report.exists()


def test_lean_says_where_it_means_nothing(place: Place, server: RunningServer) -> None:
    done = place.run("launch", "opencode", "--server", server.url, "--lean")
    assert "no lean form" in done.stderr


def test_one_openclaw_at_a_time(place: Place, server: RunningServer) -> None:
    first = place.start("launch", "openclaw", "--server", server.url, DOUBLE_DOES="wait")
    place.seen()
    second = place.run("launch", "openclaw", "--server", server.url)
    assert second.returncode == 1
    assert "one at a time" in second.stderr
    place.report.with_suffix(".go").touch()
    assert first.communicate(timeout=60) is not None
    assert first.returncode == 0
    assert place.run("launch", "openclaw", "--server", server.url).returncode == 0


def test_version_that_was_not_tested_is_said(place: Place, server: RunningServer) -> None:
    (place.bin / "package.json").write_text(json.dumps({"name": "@openai/codex", "version": "0.99.0"}))
    done = place.run("launch", "codex", "--server", server.url)
    assert done.returncode == 0
    assert "0.99.0" in done.stderr


def test_agent_inside_an_agents_terminal(place: Place, server: RunningServer) -> None:
    """Refused at a terminal, where two full-screen programs would meet; a command run by an agent may do it."""
    with Terminal({**place.environment, "FT_LAUNCH_AGENT": "claude"}, place.repository) as terminal:
        terminal.type(f"{' '.join(FT)} launch codex --server {server.url}; echo status=$?\n")
        assert "inside `ft launch claude`" in terminal.expect("status=1")
    assert not place.report.exists()
    assert place.run("launch", "codex", "--server", server.url, FT_LAUNCH_AGENT="claude").returncode == 0
    assert place.seen()["environment"]["FT_LAUNCH_AGENT"] == "codex"


def test_unwritable_home_is_one_sentence(place: Place, server: RunningServer) -> None:
    blocked = place.ft_home.parent / "file"
    blocked.write_text("in the way")
    done = place.run("launch", "codex", "--server", server.url, FT_HOME=str(blocked / "ft"))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert str(blocked) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--server", "ftp://x"), "is not the address of a server"),
        (("--server", "http://127.0.0.1:9"), "no server answers at"),
        (("--server", "URL", "--model", "other"), "has no model other"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--model", "./nowhere"), "nowhere"),
        (("--model", "demo"), "ft pull demo"),
        ((), "ft pull demo"),
    ],
)
def test_refusals(arguments: tuple[str, ...], said: str, place: Place, server: RunningServer) -> None:
    done = place.run("launch", "claude", *(server.url if part == "URL" else part for part in arguments))
    assert done.returncode == 1
    assert said in done.stderr, done.stderr
    assert not place.report.exists()
    assert "Traceback" not in done.stderr


def test_agent_that_is_no_program(place: Place, server: RunningServer, tmp_path: Path) -> None:
    (place.bin / "claude").write_bytes(b"\x7fELF broken")
    done = place.run("launch", "claude", "--server", server.url)
    assert done.returncode == 1
    assert "cannot be started" in done.stderr
