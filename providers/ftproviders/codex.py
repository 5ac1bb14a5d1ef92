"""Codex CLI: OpenAI Responses.

Everything goes in as `-c key=value`, which stands above config.toml, its profiles and a repository's .codex folder;
no file of the user's is needed. The model's metadata is a catalogue in ft's own folder: without it Codex does not know
the window and offers no patch tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ftproviders import environment
from ftproviders.base import AgentPlan, Endpoint, FirstPrompt, LaunchOptions, Npm, Provider
from ftproviders.codex_instructions import INSTRUCTIONS

PROVIDER_ID = "ft_local"  # not a word that a user's own config.toml is likely to define: tables of one name merge
KEY_VARIABLE = "FT_API_KEY"
COMPACT_AT = 0.85  # of the window; an overlong prompt ends the thread, so compaction has to come in time

QUIET = {
    "check_for_update_on_startup": False,
    "web_search": "disabled",
    "analytics.enabled": False,
    "feedback.enabled": False,
    "features.plugins": False,
    "features.apps": False,
}

LEAN = {
    "features.goals": False,
    "features.multi_agent": False,
    "features.image_generation": False,
    "features.tool_suggest": False,
    "features.skill_search": False,
    "features.sleep_tool": False,
    "features.view_image": False,
    "skills.bundled.enabled": False,
}

HEADLESS_COMMANDS = ("exec", "e", "review")


class Codex(Provider):
    name = "codex"
    title = "Codex CLI"
    npm = Npm("@openai/codex", "0.171.0", (0, 171))
    executable = "codex"
    first_prompt = FirstPrompt(headless=5_300, interactive=8_300)
    lean_prompt = FirstPrompt(headless=1_950, interactive=5_000)

    def headless(self, user_args: Sequence[str]) -> bool:
        return any(argument in HEADLESS_COMMANDS for argument in user_args)

    def plan(
        self,
        command: Sequence[str],
        endpoint: Endpoint,
        options: LaunchOptions,
        folder: Path,
        environ: Mapping[str, str],
    ) -> AgentPlan:
        catalog = folder / f"models-{_file_name(endpoint.model)}-{endpoint.context_window}.json"
        settings = {**self._routing(endpoint, catalog), **QUIET, **(LEAN if options.lean else {})}
        env_set = {KEY_VARIABLE: endpoint.api_key, **environment.without_proxy_for_loopback(environ)}
        seeds: dict[Path, str] = {}
        if options.isolated:
            env_set["CODEX_HOME"] = str(folder / "home")
            seeds[folder / "home" / "config.toml"] = ""
        overrides = [part for key, value in settings.items() for part in ("-c", f"{key}={_toml(value)}")]
        return AgentPlan(
            argv=(*command, *overrides, *options.user_args),
            env_set=env_set,
            env_remove=environment.removed(environ.keys() - env_set.keys(), strip_all=options.strip_all),
            files={catalog: json.dumps({"models": [self._metadata(endpoint, options)]}, indent=1)},
            seeds=seeds,
        )

    def _routing(self, endpoint: Endpoint, catalog: Path) -> dict[str, object]:
        return {
            "model": endpoint.model,
            "review_model": endpoint.model,
            "model_provider": PROVIDER_ID,
            "model_catalog_json": str(catalog),
            "model_context_window": endpoint.context_window,
            "model_auto_compact_token_limit": int(endpoint.context_window * COMPACT_AT),
            f"model_providers.{PROVIDER_ID}": {
                "name": "FT local",
                "base_url": endpoint.v1,
                "wire_api": "responses",
                "env_key": KEY_VARIABLE,
                "stream_idle_timeout_ms": 3_600_000,
                "stream_max_retries": 2,
                "request_max_retries": 2,
            },
        }

    def _metadata(self, endpoint: Endpoint, options: LaunchOptions) -> dict[str, object]:
        """One entry of Codex's model catalogue; it refuses a catalogue that lacks any of these keys."""
        window = endpoint.context_window
        return {
            "slug": endpoint.model,
            "display_name": endpoint.model,
            "description": "answered on this machine",
            "context_window": window,
            "max_context_window": window,
            "effective_context_window_percent": 100 * (window - self.output_tokens(endpoint, options)) // window,
            "shell_type": "shell_command",
            "visibility": "list",
            "supported_in_api": True,
            "priority": 0,
            "additional_speed_tiers": [],
            "service_tiers": [],
            # One tool result takes at most about an eighth of the window (four bytes a token).
            "truncation_policy": {"mode": "bytes", "limit": min(10_000, window // 2)},
            "input_modalities": ["text"],
            "base_instructions": INSTRUCTIONS,
            "apply_patch_tool_type": "freeform",
            "default_reasoning_summary": "none",
            "supported_reasoning_levels": [],
            "supports_reasoning_summaries": False,
            "experimental_supported_tools": [],
            "supports_search_tool": False,
            "web_search_tool_type": "text",
            "supports_image_detail_original": False,
            "support_verbosity": False,
            "default_verbosity": None,
            "supports_parallel_tool_calls": True,
            "use_responses_lite": False,
            "model_messages": None,
            "upgrade": None,
        }


def _toml(value: object) -> str:
    """A TOML value; JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _file_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", model)
