"""The plan for OpenClaw: its own state folder, and the user's repository only as the working directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftproviders import AgentPlan, Endpoint, LaunchOptions
from ftproviders.openclaw import OpenClaw

FOLDER = Path("/ft/agents/openclaw")
REPOSITORY = Path("/home/dev/repository")


def plan(endpoint: Endpoint, **options: Any) -> AgentPlan:
    return OpenClaw().plan(
        ["node", "openclaw.mjs"], endpoint, LaunchOptions(directory=REPOSITORY, **options), FOLDER, {}
    )


def config(made: AgentPlan) -> dict[str, Any]:
    [(path, text)] = made.files.items()
    assert path == Path(made.env_set["OPENCLAW_STATE_DIR"]) / "openclaw.json"
    parsed = json.loads(text)
    assert isinstance(parsed, dict)
    return parsed


def test_state_folder_is_ours_and_the_same_for_every_server(endpoint: Endpoint) -> None:
    made = plan(endpoint)
    assert Path(made.env_set["OPENCLAW_STATE_DIR"]).is_relative_to(FOLDER)
    other = plan(replace(endpoint, url="http://127.0.0.1:2000", model="b", api_key="c"))
    assert other.env_set["OPENCLAW_STATE_DIR"] == made.env_set["OPENCLAW_STATE_DIR"]
    assert made.exclusive == FOLDER / "state.lock"


def test_workspace_is_never_the_repository(endpoint: Endpoint) -> None:
    defaults = config(plan(endpoint))["agents"]["defaults"]
    assert Path(defaults["workspace"]).is_relative_to(FOLDER)
    assert defaults["cwd"] == str(REPOSITORY)


def test_provider_and_limits(endpoint: Endpoint) -> None:
    made = plan(endpoint)
    provider = config(made)["models"]["providers"]["ft-local"]
    assert (provider["baseUrl"], provider["api"]) == ("http://127.0.0.1:1919/v1", "openai-completions")
    assert provider["apiKey"] == "${FT_API_KEY}"
    assert made.env_set["FT_API_KEY"] == "key-of-server"
    assert (provider["models"][0]["contextWindow"], provider["models"][0]["maxTokens"]) == (65_536, 8_192)
    assert config(made)["agents"]["defaults"]["model"] == {"primary": "ft-local/demo"}
    assert config(made)["update"] == {"checkOnStart": False}


@pytest.mark.parametrize(
    ("user_args", "argv"), [((), ("chat",)), (("agent", "--local", "-m", "hi"), ("agent", "--local", "-m", "hi"))]
)
def test_arguments(user_args: tuple[str, ...], argv: tuple[str, ...], endpoint: Endpoint) -> None:
    assert plan(endpoint, user_args=user_args).argv == ("node", "openclaw.mjs", *argv)


@pytest.mark.parametrize(
    ("version", "runs"),
    [
        ((24, 15), False),
        ((24, 16), True),
        ((24, 99), True),
        ((25, 0), False),
        ((26, 0), False),
        ((26, 1), True),
        ((20, 20), False),
    ],
)
def test_node_range(version: tuple[int, int], runs: bool) -> None:
    assert OpenClaw().runs_on_node(version) is runs
