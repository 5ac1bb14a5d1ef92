"""OpenClaw: Chat Completions, in a state folder of ft's own.

The folder's path stands in the middle of its system prompt, so it is the same for every launch. OpenClaw writes notes
about itself into its workspace, which therefore is never the user's repository: that is its working directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftproviders import environment
from ftproviders.base import AgentPlan, Endpoint, FirstPrompt, LaunchOptions, Npm, Provider

PROVIDER_ID = "ft-local"
KEY_VARIABLE = "FT_API_KEY"

QUIET = {
    "DO_NOT_TRACK": "1",
    "OPENCLAW_OFFLINE": "1",  # no download of search tools when the terminal interface starts
}

TERMINAL = ("chat",)  # its interface that needs no gateway, when the user names no command


class OpenClaw(Provider):
    name = "openclaw"
    title = "OpenClaw"
    npm = Npm("openclaw", "2026.9.6", (2026, 9))
    executable = "openclaw"
    first_prompt = FirstPrompt(headless=13_200, interactive=13_200)
    needs_own_node = True

    def runs_on_node(self, version: tuple[int, int]) -> bool:
        """As its package states: >= 24.16 < 25 or >= 26.1."""
        return (24, 16) <= version < (25, 0) or version >= (26, 1)

    def headless(self, user_args: Sequence[str]) -> bool:
        return "agent" in user_args

    def plan(
        self,
        command: Sequence[str],
        endpoint: Endpoint,
        options: LaunchOptions,
        folder: Path,
        environ: Mapping[str, str],
    ) -> AgentPlan:
        state = folder / "state"
        env_set = {
            "OPENCLAW_STATE_DIR": str(state),
            KEY_VARIABLE: endpoint.api_key,
            **QUIET,
            **environment.without_proxy_for_loopback(environ),
        }
        return AgentPlan(
            argv=(*command, *(options.user_args or TERMINAL)),
            env_set=env_set,
            env_remove=environment.removed(environ.keys() - env_set.keys(), strip_all=options.strip_all),
            files={state / "openclaw.json": json.dumps(self._config(endpoint, options, state), indent=1)},
            exclusive=folder / "state.lock",
        )

    def _config(self, endpoint: Endpoint, options: LaunchOptions, state: Path) -> dict[str, Any]:
        model = {
            "id": endpoint.model,
            "name": endpoint.model,
            "reasoning": False,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": endpoint.context_window,
            "maxTokens": self.output_tokens(endpoint, options),
        }
        provider = {
            "baseUrl": endpoint.v1,
            "apiKey": f"${{{KEY_VARIABLE}}}",
            "api": "openai-completions",
            "timeoutSeconds": 3600,
            "models": [model],
        }
        return {
            "models": {"mode": "merge", "providers": {PROVIDER_ID: provider}},
            "agents": {
                "defaults": {
                    "model": {"primary": f"{PROVIDER_ID}/{endpoint.model}"},
                    "workspace": str(state / "workspace"),
                    "cwd": str(options.directory.absolute()),
                    "heartbeat": {"every": "0m"},  # no turns of its own while the user is away
                }
            },
            "update": {"checkOnStart": False},
        }
