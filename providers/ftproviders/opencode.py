"""OpenCode: Chat Completions.

Everything goes in through OPENCODE_CONFIG_CONTENT, the highest of the sources that a user or a repository controls;
nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftproviders import environment
from ftproviders.base import AgentPlan, Endpoint, FirstPrompt, LaunchOptions, Npm, Provider

PROVIDER_ID = "ft_local"
KEY_VARIABLE = "FT_API_KEY"

# A user's or repository's settings can give each of them a model of its own, which would stand above `model`.
BUILT_IN_AGENTS = ("build", "plan", "general", "explore", "compaction", "title", "summary")

QUIET = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}

COMPACTION_ROOM = 4_000  # tokens; with less between first prompt and window, compaction would never end


class OpenCode(Provider):
    name = "opencode"
    title = "OpenCode"
    npm = Npm("opencode-ai", "1.18.33", (1, 18))
    executable = "opencode"
    first_prompt = FirstPrompt(headless=7_600, interactive=7_600)

    def headless(self, user_args: Sequence[str]) -> bool:
        return "run" in user_args

    def plan(
        self,
        command: Sequence[str],
        endpoint: Endpoint,
        options: LaunchOptions,
        folder: Path,
        environ: Mapping[str, str],
    ) -> AgentPlan:
        users, notes = _users_content(environ)
        env_set = {
            KEY_VARIABLE: endpoint.api_key,
            "OPENCODE_CONFIG_CONTENT": json.dumps(_merged(users, self._config(endpoint, options))),
            # Replaces auth.json, whose entries could add cloud models or a configuration fetched from elsewhere.
            "OPENCODE_AUTH_CONTENT": "{}",
            **QUIET,
            **environment.without_proxy_for_loopback(environ),
        }
        if options.isolated:
            env_set |= {f"XDG_{kind}_HOME": str(folder / "home" / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
        return AgentPlan(
            argv=(*command, *options.user_args),
            env_set=env_set,
            env_remove=environment.removed(environ.keys() - env_set.keys(), strip_all=options.strip_all),
            notes=notes,
        )

    def _config(self, endpoint: Endpoint, options: LaunchOptions) -> dict[str, Any]:
        model = f"{PROVIDER_ID}/{endpoint.model}"
        output = self.output_tokens(endpoint, options)
        limit = {"context": endpoint.context_window, "output": output}
        config: dict[str, Any] = {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "enabled_providers": [PROVIDER_ID],
            "disabled_providers": [],
            "provider": {
                PROVIDER_ID: {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "FT local",
                    "options": {
                        "baseURL": endpoint.v1,
                        "apiKey": f"{{env:{KEY_VARIABLE}}}",
                        "timeout": False,
                        "headerTimeout": False,
                        "chunkTimeout": 3_600_000,
                    },
                    "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
                }
            },
            "model": model,
            "small_model": model,
            "agent": {agent: {"model": model} for agent in BUILT_IN_AGENTS},
        }
        if endpoint.context_window - output - self.prompt_tokens(options) < COMPACTION_ROOM:
            config["compaction"] = {"auto": False}
        return config


def _users_content(environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    text = environ.get("OPENCODE_CONFIG_CONTENT", "")
    try:
        content = json.loads(text) if text else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return {}, ("your OPENCODE_CONFIG_CONTENT is not a JSON object and is left out",)
    return content, ()


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Objects merge key by key; anything else is replaced by `over`."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
