"""Claude Code: Anthropic Messages.

The environment alone does not hold: `env` in the user's or the repository's settings.json replaces it. Two things do,
and both are set: CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST and `--settings`, which stands above every settings file but an
administrator's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ftproviders import environment
from ftproviders.base import AgentPlan, Endpoint, FirstPrompt, LaunchOptions, Npm, Provider

MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
    "CLAUDE_CODE_WORKFLOW_SUBAGENT_MODEL",
)

SWITCHES_OFF = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_ANTHROPIC_GOOGLE_CLOUD",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_GATEWAY",
    "CLAUDE_CODE_ENABLE_TELEMETRY",
)

QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    # A changing header line at the top of the system text would make every prompt prefix new.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    # Without it the client's start rewrites `"model": "opus"` in the user's settings to a million-token variant.
    "CLAUDE_CODE_DISABLE_1M_CONTEXT": "1",
}

PATIENCE = {
    "API_TIMEOUT_MS": "3600000",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
    "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": "1800000",
}

COMPACTION_BUFFER = 13_000  # tokens that the client keeps free, beside the answer, before it compacts
WORKING_ROOM = 3_000  # tokens of tool results below which compacting would start over and over

ONBOARDED = {"hasCompletedOnboarding": True, "theme": "dark"}


class Claude(Provider):
    name = "claude"
    title = "Claude Code"
    npm = Npm("@anthropic-ai/claude-code", "2.1.332", (2, 1))
    executable = "claude"
    first_prompt = FirstPrompt(headless=11_900, interactive=13_600)
    lean_prompt = FirstPrompt(headless=1_000, interactive=1_500)

    def headless(self, user_args: Sequence[str]) -> bool:
        return any(argument in ("-p", "--print") for argument in user_args)

    def plan(
        self,
        command: Sequence[str],
        endpoint: Endpoint,
        options: LaunchOptions,
        folder: Path,
        environ: Mapping[str, str],
    ) -> AgentPlan:
        shared = self._settings_environment(endpoint, options, environ)
        env_set = {"CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST": "1", "ANTHROPIC_AUTH_TOKEN": endpoint.api_key, **shared}
        seeds: dict[Path, str] = {}
        if options.lean:
            env_set["CLAUDE_CODE_SIMPLE"] = "1"
        if options.isolated:
            env_set["CLAUDE_CONFIG_DIR"] = str(folder / "home")
            seeds[folder / "home" / ".claude.json"] = json.dumps(ONBOARDED)
        notes: list[str] = []
        argv = [*command, "--model", endpoint.model]
        if not chose_permissions(options, settings_files(options, environ)):
            argv += ["--permission-mode", "manual"]
        if _has(options.user_args, "--settings"):
            notes.append("your --settings replaces ours; the address of the model stays guarded by the environment")
        else:
            argv += ["--settings", json.dumps(self._settings(endpoint, shared))]
        return AgentPlan(
            argv=(*argv, *options.user_args),
            env_set=env_set,
            env_remove=environment.removed(environ.keys() - env_set.keys(), strip_all=options.strip_all),
            seeds=seeds,
            notes=tuple(notes),
        )

    def _settings_environment(
        self, endpoint: Endpoint, options: LaunchOptions, environ: Mapping[str, str]
    ) -> dict[str, str]:
        output = self.output_tokens(endpoint, options)
        values = {
            "ANTHROPIC_BASE_URL": endpoint.url,
            **dict.fromkeys(MODEL_VARIABLES, endpoint.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context_window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output),
            **QUIET,
            **PATIENCE,
            **environment.without_proxy_for_loopback(environ),
        }
        before_compaction = endpoint.context_window - output - COMPACTION_BUFFER
        if before_compaction < self.prompt_tokens(options) + WORKING_ROOM:
            values["DISABLE_AUTO_COMPACT"] = "1"
        return values

    def _settings(self, endpoint: Endpoint, shared: Mapping[str, str]) -> dict[str, object]:
        """Without the key: arguments can be read by every user of the machine."""
        return {"model": endpoint.model, "env": {**dict.fromkeys(SWITCHES_OFF, ""), **shared}}


def settings_files(options: LaunchOptions, environ: Mapping[str, str]) -> list[Path]:
    project = options.directory / ".claude"
    own = [] if options.isolated else [_config_dir(environ) / "settings.json"]
    return [*own, project / "settings.json", project / "settings.local.json"]


def chose_permissions(options: LaunchOptions, settings: Sequence[Path]) -> bool:
    """Whether the user chose a permission mode that works without Anthropic's server (all but "auto")."""
    if _has(options.user_args, "--permission-mode", "--dangerously-skip-permissions"):
        return True
    modes = [mode for path in settings if (mode := _default_mode(path))]
    return bool(modes) and modes[-1] != "auto"


def _default_mode(path: Path) -> str | None:
    try:
        mode = json.loads(path.read_text())["permissions"]["defaultMode"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return mode if isinstance(mode, str) else None


def _config_dir(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("CLAUDE_CONFIG_DIR")
    return Path(chosen) if chosen else Path(environ.get("HOME", "~")).expanduser() / ".claude"


def _has(arguments: Sequence[str], *options: str) -> bool:
    return any(argument.split("=", 1)[0] in options for argument in arguments)
