"""The plan for Claude Code: rows of options and what they must come to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftproviders import AgentPlan, Endpoint, LaunchOptions
from ftproviders.claude import MODEL_VARIABLES, Claude

FOLDER = Path("/ft/agents/claude")


def plan(endpoint: Endpoint, environ: dict[str, str] | None = None, **options: Any) -> AgentPlan:
    return Claude().plan(["claude"], endpoint, LaunchOptions(**options), FOLDER, environ or {})


def settings(made: AgentPlan) -> dict[str, Any]:
    parsed = json.loads(made.argv[made.argv.index("--settings") + 1])
    assert isinstance(parsed, dict)
    return parsed


def test_routing_is_set_twice(endpoint: Endpoint) -> None:
    made = plan(endpoint)
    assert made.argv[:3] == ("claude", "--model", "demo")
    assert made.env_set["CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST"] == "1"
    assert made.env_set["ANTHROPIC_AUTH_TOKEN"] == "key-of-server"
    for source in (made.env_set, settings(made)["env"]):
        assert source["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1919"
        assert {source[name] for name in MODEL_VARIABLES} == {"demo"}
        assert source["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
        assert source["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
        assert source["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert settings(made)["model"] == "demo"
    assert "ANTHROPIC_AUTH_TOKEN" not in settings(made)["env"]


@pytest.mark.parametrize("switch", ["BEDROCK", "VERTEX", "FOUNDRY", "ANTHROPIC_AWS", "MANTLE", "GATEWAY"])
def test_settings_blank_the_provider_switches(switch: str, endpoint: Endpoint) -> None:
    """A value that a settings file gives is overridden by ours only where ours has one."""
    assert settings(plan(endpoint))["env"][f"CLAUDE_CODE_USE_{switch}"] == ""


def test_nothing_is_written(endpoint: Endpoint) -> None:
    made = plan(endpoint)
    assert (made.files, made.seeds, made.exclusive) == ({}, {}, None)


@pytest.mark.parametrize(
    ("user_args", "ours"),
    [
        ((), True),
        (("-p", "hi"), True),
        (("--permission-mode", "plan"), False),
        (("--permission-mode=plan",), False),
        (("--dangerously-skip-permissions",), False),
    ],
)
def test_permission_mode(user_args: tuple[str, ...], ours: bool, endpoint: Endpoint) -> None:
    made = plan(endpoint, user_args=user_args)
    before_users = made.argv[: len(made.argv) - len(user_args)]
    assert ("--permission-mode" in before_users) is ours
    assert made.argv[len(before_users) :] == user_args


@pytest.mark.parametrize(
    ("where", "mode", "ours"),
    [
        ("home/.claude/settings.json", "acceptEdits", False),
        ("home/.claude/settings.json", "auto", True),
        ("repo/.claude/settings.json", "plan", False),
        ("repo/.claude/settings.local.json", "default", False),
        ("repo/.claude/settings.local.json", 7, True),
    ],
)
def test_permission_mode_of_settings_files(
    where: str, mode: object, ours: bool, tmp_path: Path, endpoint: Endpoint
) -> None:
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"permissions": {"defaultMode": mode}}))
    made = plan(endpoint, {"HOME": str(tmp_path / "home")}, directory=tmp_path / "repo")
    assert ("--permission-mode" in made.argv) is ours


@pytest.mark.parametrize("text", ["", "{", "[]", '{"permissions": []}', "\udcff"])
def test_unreadable_settings_are_no_choice(text: str, tmp_path: Path, endpoint: Endpoint) -> None:
    path = tmp_path / ".claude" / "settings.json"
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "manual" in plan(endpoint, {"HOME": str(tmp_path)}).argv


def test_users_own_settings_argument_stays_alone(endpoint: Endpoint) -> None:
    made = plan(endpoint, user_args=("--settings", "mine.json"))
    assert made.argv.count("--settings") == 1
    assert len(made.notes) == 1


def test_lean_and_isolated(endpoint: Endpoint) -> None:
    made = plan(endpoint, lean=True, isolated=True)
    assert made.env_set["CLAUDE_CODE_SIMPLE"] == "1"
    assert made.env_set["CLAUDE_CONFIG_DIR"] == str(FOLDER / "home")
    assert json.loads(made.seeds[FOLDER / "home" / ".claude.json"])["hasCompletedOnboarding"] is True
    assert "CLAUDE_CODE_SIMPLE" not in plan(endpoint).env_set


@pytest.mark.parametrize(
    ("window", "lean", "compacts"),
    [(8_192, True, False), (16_384, True, False), (65_536, True, True), (32_768, False, False), (65_536, False, True)],
)
def test_compaction_is_off_where_it_would_never_end(
    window: int, lean: bool, compacts: bool, endpoint: Endpoint
) -> None:
    """The client compacts at window - answer - 13,000 tokens; measured: below the prompt it compacts at every turn."""
    made = plan(replace(endpoint, context_window=window), lean=lean)
    assert ("DISABLE_AUTO_COMPACT" not in made.env_set) is compacts
