"""The plan for Codex: overrides that are TOML, a catalogue with what Codex insists on, and no file of the user's."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftproviders import AgentPlan, Endpoint, LaunchOptions
from ftproviders.codex import Codex

FOLDER = Path("/ft/agents/codex")


def plan(endpoint: Endpoint, **options: Any) -> AgentPlan:
    return Codex().plan(["codex"], endpoint, LaunchOptions(**options), FOLDER, {})


def overrides(made: AgentPlan) -> list[str]:
    return [value for flag, value in zip(made.argv, made.argv[1:], strict=False) if flag == "-c"]


def catalogue(made: AgentPlan) -> tuple[Path, dict[str, Any]]:
    [(path, text)] = made.files.items()
    [entry] = json.loads(text)["models"]
    return path, entry


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib, the independent reader, came with Python 3.11")
def test_overrides_are_toml_and_route_to_the_server(endpoint: Endpoint) -> None:
    import tomllib

    made = plan(replace(endpoint, model='od"d\\name'))
    config = tomllib.loads("\n".join(overrides(made)))
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:1919/v1"
    assert provider["wire_api"] == "responses"
    assert made.env_set[provider["env_key"]] == "key-of-server"
    assert config["model"] == config["review_model"] == 'od"d\\name'
    assert config["model_context_window"] == 65_536
    assert config["model_auto_compact_token_limit"] < 65_536 - 8_192 + 1
    assert config["model_catalog_json"] == str(catalogue(made)[0])
    assert (config["analytics"]["enabled"], config["check_for_update_on_startup"]) == (False, False)


def test_provider_is_not_a_name_that_users_define(endpoint: Endpoint) -> None:
    assert 'model_provider="ft_local"' in overrides(plan(endpoint))


def test_catalogue_states_the_true_window(endpoint: Endpoint) -> None:
    path, entry = catalogue(plan(endpoint))
    assert path.is_relative_to(FOLDER)
    assert (entry["slug"], entry["context_window"], entry["max_context_window"]) == ("demo", 65_536, 65_536)
    assert entry["effective_context_window_percent"] == 87  # 65,536 - 8,192 of 65,536
    assert entry["apply_patch_tool_type"] == "freeform"
    assert 1_500 < len(entry["base_instructions"]) < 3_000


def test_catalogues_of_different_servers_do_not_clash(endpoint: Endpoint) -> None:
    paths = {
        catalogue(plan(e))[0] for e in (endpoint, replace(endpoint, context_window=8_192), replace(endpoint, model="b"))
    }
    assert len(paths) == 3
    odd, _ = catalogue(plan(replace(endpoint, model="../../etc/passwd")))
    assert odd.parent == FOLDER


def test_small_window_cuts_tool_output(endpoint: Endpoint) -> None:
    _, entry = catalogue(plan(replace(endpoint, context_window=8_192)))
    assert entry["truncation_policy"] == {"mode": "bytes", "limit": 4_096}


def test_user_arguments_come_last(endpoint: Endpoint) -> None:
    assert plan(endpoint, user_args=("exec", "-c", "model=mine")).argv[-3:] == ("exec", "-c", "model=mine")


def test_lean_leaves_the_large_tools_out(endpoint: Endpoint) -> None:
    assert "features.multi_agent=false" in overrides(plan(endpoint, lean=True))
    assert "features.multi_agent=false" not in overrides(plan(endpoint))


def test_isolated(endpoint: Endpoint) -> None:
    made = plan(endpoint, isolated=True)
    home = Path(made.env_set["CODEX_HOME"])
    assert home.is_relative_to(FOLDER)
    assert [path.parent for path in made.seeds] == [home]  # Codex refuses a CODEX_HOME that does not exist
    assert "CODEX_HOME" not in plan(endpoint).env_set
