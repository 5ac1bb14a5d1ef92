"""The plan for OpenCode: one variable that merges over whatever the user has in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftproviders import AgentPlan, Endpoint, LaunchOptions
from ftproviders.opencode import OpenCode

FOLDER = Path("/ft/agents/opencode")


def plan(endpoint: Endpoint, environ: dict[str, str] | None = None, **options: Any) -> AgentPlan:
    return OpenCode().plan(["opencode"], endpoint, LaunchOptions(**options), FOLDER, environ or {})


def content(made: AgentPlan) -> dict[str, Any]:
    parsed = json.loads(made.env_set["OPENCODE_CONFIG_CONTENT"])
    assert isinstance(parsed, dict)
    return parsed


def test_only_our_provider(endpoint: Endpoint) -> None:
    made = plan(endpoint)
    config = content(made)
    provider = config["provider"]["ft_local"]
    assert config["enabled_providers"] == ["ft_local"]
    assert config["disabled_providers"] == []
    assert config["model"] == config["small_model"] == "ft_local/demo"
    assert provider["options"]["baseURL"] == "http://127.0.0.1:1919/v1"
    assert provider["options"]["apiKey"] == "{env:FT_API_KEY}"
    assert provider["models"] == {"demo": {"name": "demo", "limit": {"context": 65_536, "output": 8_192}}}
    assert made.env_set["OPENCODE_AUTH_CONTENT"] == "{}"
    assert made.argv == ("opencode",)


@pytest.mark.parametrize("agent", ["build", "plan", "general", "explore", "title", "summary", "compaction"])
def test_no_built_in_agent_keeps_a_model_of_its_own(agent: str, endpoint: Endpoint) -> None:
    users = {"agent": {agent: {"model": "evil/m", "temperature": 0.1}}}
    config = content(plan(endpoint, {"OPENCODE_CONFIG_CONTENT": json.dumps(users)}))
    assert config["agent"][agent] == {"model": "ft_local/demo", "temperature": 0.1}


def test_ours_merges_over_the_users(endpoint: Endpoint) -> None:
    users = {
        "theme": "light",
        "model": "evil/m",
        "enabled_providers": ["evil", "other"],
        "provider": {"evil": {"name": "Evil"}, "ft_local": {"options": {"baseURL": "http://evil", "extra": 1}}},
        "mcp": {"docs": {"type": "local"}},
    }
    config = content(plan(endpoint, {"OPENCODE_CONFIG_CONTENT": json.dumps(users)}))
    assert (config["theme"], config["mcp"]) == ("light", {"docs": {"type": "local"}})
    assert (config["model"], config["enabled_providers"]) == ("ft_local/demo", ["ft_local"])
    assert config["provider"]["ft_local"]["options"]["baseURL"] == "http://127.0.0.1:1919/v1"
    assert config["provider"]["ft_local"]["options"]["extra"] == 1


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_what_is_no_object_is_left_out_and_said(text: str, endpoint: Endpoint) -> None:
    made = plan(endpoint, {"OPENCODE_CONFIG_CONTENT": text})
    assert content(made)["model"] == "ft_local/demo"
    assert len(made.notes) == 1


@pytest.mark.parametrize(("window", "compacts"), [(8_192, False), (12_000, False), (32_768, True), (131_072, True)])
def test_compaction_is_off_where_it_would_never_end(window: int, compacts: bool, endpoint: Endpoint) -> None:
    """Measured at 8,192 tokens: the client compacted after every step and began the task again, for ever."""
    config = content(plan(replace(endpoint, context_window=window)))
    assert ("compaction" not in config) is compacts


def test_isolated(endpoint: Endpoint) -> None:
    made = plan(endpoint, isolated=True)
    assert {name for name in made.env_set if name.startswith("XDG_")} == {
        "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
    }  # fmt: skip
    assert all(Path(made.env_set[n]).is_relative_to(FOLDER) for n in made.env_set if n.startswith("XDG_"))
