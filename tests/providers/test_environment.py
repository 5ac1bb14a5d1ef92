"""Against the names that the four agents are known to read, written down here from their bundles and documentation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftproviders import PROVIDERS, Endpoint, LaunchOptions, environment

# {a,b} is expanded; a trailing * stands for more characters.
ROUTING = """
ANTHROPIC_{API_KEY,AUTH_TOKEN,OAUTH_TOKEN,ADMIN_API_KEY,BASE_URL,UNIX_SOCKET,CUSTOM_HEADERS,BETAS,PROFILE}
ANTHROPIC_{FEDERATION_RULE_ID,IDENTITY_TOKEN,IDENTITY_TOKEN_FILE,MODEL,SMALL_FAST_MODEL,SMALL_FAST_MODEL_AWS_REGION}
ANTHROPIC_DEFAULT_{OPUS,SONNET,HAIKU,FABLE}_MODEL* ANTHROPIC_CUSTOM_MODEL_OPTION* CLAUDE_API_KEY
_CLAUDE_CODE_ASSUME_FIRST_PARTY_BASE_URL CLAUDE_CODE_OAUTH_{TOKEN,REFRESH_TOKEN,SCOPES,CLIENT_ID}
CLAUDE_CODE_{OAUTH_TOKEN,API_KEY,GATEWAY_TOKEN,WEBSOCKET_AUTH}_FILE_DESCRIPTOR CLAUDE_CODE_SESSION_ACCESS_TOKEN
CLAUDE_CODE_{SESSIONS_OAUTH_TOKEN,GATEWAY_TOKEN,HOST_AUTH_ENV_VAR,HOST_CREDS_FILE,API_BASE_URL,CUSTOM_OAUTH_URL}
CLAUDE_CODE_GB_BASE_URL CLAUDE_BRIDGE_* CLAUDE_CODE_{ARTIFACTS,MEMORY}_API_{BASE_URL,TOKEN}
CLAUDE_CODE_CLIENT_{CERT,KEY,KEY_PASSPHRASE}
CLAUDE_CODE_USE_{BEDROCK,VERTEX,FOUNDRY,ANTHROPIC_AWS,ANTHROPIC_GOOGLE_CLOUD,MANTLE,GATEWAY}
CLAUDE_CODE_SKIP_{BEDROCK,VERTEX,FOUNDRY,ANTHROPIC_AWS,ANTHROPIC_GOOGLE_CLOUD,MANTLE}_AUTH
ANTHROPIC_{BEDROCK,BEDROCK_MANTLE,VERTEX,FOUNDRY,AWS,GOOGLE_CLOUD}_BASE_URL
ANTHROPIC_FOUNDRY_{API_KEY,AUTH_TOKEN,RESOURCE} ANTHROPIC_AWS_{API_KEY,WORKSPACE_ID} ANTHROPIC_VERTEX_PROJECT_ID
ANTHROPIC_GOOGLE_CLOUD_{PROJECT,LOCATION,WORKSPACE_ID} ANTHROPIC_BEDROCK_{SERVICE_TIER,REGION_PREFIX}
CLOUD_ML_REGION VERTEX_REGION_* AWS_BEARER_TOKEN_BEDROCK
GOOGLE_{API_KEY,GENERATIVE_AI_API_KEY,CLOUD_API_KEY,GEMINI_BASE_URL} GOOGLE_VERTEX_{API_KEY,PROJECT,LOCATION}
GEMINI_API_KEY AZURE_OPENAI_{API_KEY,ENDPOINT,BASE_URL} AZURE_API_KEY AZURE_RESOURCE_NAME
AZURE_COGNITIVE_SERVICES_{API_KEY,RESOURCE_NAME}
OPENAI_{API_KEY,BASE_URL,API_BASE,ORG_ID,ORGANIZATION,PROJECT,MODEL,IDENTITY_TOKEN_FILE,IDENTITY_TOKEN_SOURCE}
OPENAI_FEDERATION_RULE_ID CODEX_{API_KEY,ACCESS_TOKEN,OSS_BASE_URL,OSS_PORT,EXEC_SERVER_URL}
CODEX_APP_SERVER_LOGIN_ISSUER CODEX_GITHUB_PERSONAL_ACCESS_TOKEN
OPENCODE_{API_KEY,AUTH_CONTENT,CONSOLE_TOKEN,CONFIG,CONFIG_DIR,PERMISSION,MODELS_URL,MODELS_PATH,ZEN_API_KEY}
{OPENROUTER,GROQ,MISTRAL,XAI,DEEPSEEK,TOGETHER,TOGETHER_AI,FIREWORKS,CEREBRAS,COHERE,PERPLEXITY,NVIDIA}_API_KEY
{MOONSHOT,KIMI,MINIMAX,ZHIPU,DASHSCOPE,ALIBABA,ARK,SILICONFLOW,SILICONFLOW_CN,NEBIUS,BASETEN,DEEPINFRA}_API_KEY
{CHUTES,VENICE,POE,HELICONE,REQUESTY,VERCEL,V0,AI_GATEWAY,LLMGATEWAY,OLLAMA,LMSTUDIO,CLOUDFLARE}_API_KEY
{QWEN,MODELSTUDIO,LITELLM,VLLM,SGLANG,CLAWROUTER}_API_KEY SNOWFLAKE_CORTEX_TOKEN CF_AIG_TOKEN FRIENDLI_TOKEN
MINIMAX_{OAUTH_TOKEN,CODING_API_KEY,API_HOST} COPILOT_GITHUB_TOKEN LM_API_TOKEN XAI_BASE_URL
OPENCLAW_GATEWAY_{URL,TOKEN,PASSWORD} OPENCLAW_{STATE_DIR,CONFIG_PATH,PROFILE,HOME,LOAD_SHELL_ENV}
OTEL_* CLAUDE_CODE_ENABLE_TELEMETRY BETA_TRACING_ENDPOINT
"""
WORK = """
AWS_{ACCESS_KEY_ID,SECRET_ACCESS_KEY,SESSION_TOKEN,PROFILE,DEFAULT_PROFILE,CONFIG_FILE,SHARED_CREDENTIALS_FILE}
AWS_{REGION,DEFAULT_REGION,ROLE_ARN,WEB_IDENTITY_TOKEN_FILE} AWS_CONTAINER_* AWS_EC2_METADATA_* AWS_ENDPOINT_URL
GOOGLE_APPLICATION_CREDENTIALS GOOGLE_CLOUD_{PROJECT,QUOTA_PROJECT,LOCATION} GCLOUD_PROJECT
GCE_METADATA_{HOST,IP,ROOT} METADATA_SERVER_DETECTION
AZURE_{CLIENT_ID,CLIENT_SECRET,TENANT_ID,FEDERATED_TOKEN_FILE,TOKEN_CREDENTIALS,AUTHORITY_HOST}
HF_TOKEN GITHUB_TOKEN GH_TOKEN GITLAB_TOKEN DATABRICKS_TOKEN CLOUDFLARE_{API_TOKEN,ACCOUNT_ID}
DIGITALOCEAN_ACCESS_TOKEN
"""
OTHERS = """
PATH HOME LANG TERM EDITOR SSH_AUTH_SOCK STRIPE_API_KEY SENTRY_AUTH_TOKEN DATABASE_URL NODE_OPTIONS VIRTUAL_ENV
CLAUDE_CODE_MAX_OUTPUT_TOKENS CLAUDE_CODE_MAX_CONTEXT_TOKENS CLAUDE_CODE_FILE_READ_MAX_OUTPUT_TOKENS
CLAUDE_CODE_IDLE_COMPACT_MIN_TOKENS CLAUDE_CONFIG_DIR CODEX_HOME MAX_THINKING_TOKENS
HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy CLAUDE_CODE_HTTPS_PROXY MY_OPENAI_NOTES OTELLO
"""


def expand(table: str) -> list[str]:
    names: list[str] = []
    for word in table.split():
        parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(word.replace("}", "{").split("{"))]
        for name in map("".join, itertools.product(*parts)):
            names += [name.rstrip("*"), name.rstrip("*") + "X_9"] if name.endswith("*") else [name]
    return [name.rstrip("_") for name in names]


def test_expand() -> None:
    assert expand("A_{B,C}_D* E") == ["A_B_D", "A_B_DX_9", "A_C_D", "A_C_DX_9", "E"]


@pytest.mark.parametrize(
    "name", [name for name in expand(ROUTING) if name not in ("CLAUDE_BRIDGE", "VERTEX_REGION", "OTEL")]
)
def test_routing_always_goes(name: str) -> None:
    assert environment.is_removed(name)


@pytest.mark.parametrize("name", expand(WORK))
def test_work_credentials_go_only_when_asked(name: str) -> None:
    assert not environment.is_removed(name)
    if name not in ("AWS_CONTAINER", "AWS_EC2_METADATA"):
        assert environment.is_removed(name, strip_all=True)


@pytest.mark.parametrize("name", expand(OTHERS))
def test_everything_else_stays(name: str) -> None:
    assert not environment.is_removed(name, strip_all=True)


@pytest.mark.parametrize("agent", list(PROVIDERS))
@pytest.mark.parametrize("strip_all", [False, True])
@pytest.mark.parametrize("isolated", [False, True])
@settings(max_examples=30, deadline=None)
@given(names=st.sets(st.sampled_from(sorted({*expand(ROUTING), *expand(WORK), *expand(OTHERS)}))))
def test_no_planted_value_routes_a_child(agent: str, strip_all: bool, isolated: bool, names: set[str]) -> None:
    """Whatever subset a user has set: in the child such a name is gone, or has our value."""
    planted = {name: f"planted-{name}" for name in names}
    endpoint = Endpoint("http://127.0.0.1:1919", "demo", 65_536, 8_192, "key")
    options = LaunchOptions(strip_all=strip_all, isolated=isolated)
    plan = PROVIDERS[agent].plan(["agent"], endpoint, options, Path("/ft/agents/x"), planted)
    child = plan.child_environment(planted)
    forbidden = {*expand(ROUTING)} | ({*expand(WORK)} if strip_all else set())
    forbidden -= {"CLAUDE_BRIDGE", "VERTEX_REGION", "OTEL", "AWS_CONTAINER", "AWS_EC2_METADATA"}
    assert {name for name in forbidden if child.get(name, "").startswith("planted-")} == set()
    assert plan.env_remove == tuple(sorted(planted.keys() - child.keys()))
    assert {name for name in planted if name in plan.env_set} & set(plan.env_remove) == set()
    kept = {*expand(OTHERS)} & names - plan.env_set.keys()
    assert {name: child.get(name) for name in kept} == {name: planted[name] for name in kept}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "corp.example, localhost"}, "corp.example,localhost,127.0.0.1,::1"),
        ({"no_proxy": ".corp"}, ".corp,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "*"}, "*,127.0.0.1,localhost,::1"),
    ],
)
def test_no_proxy_is_extended(before: dict[str, str], after: str) -> None:
    assert environment.without_proxy_for_loopback(before) == {"NO_PROXY": after, "no_proxy": after}


@pytest.mark.parametrize("agent", list(PROVIDERS))
def test_proxies_stay_and_loopback_passes_them_by(agent: str, endpoint: Endpoint) -> None:
    environ = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "corp"}
    plan = PROVIDERS[agent].plan(["agent"], endpoint, LaunchOptions(), Path("/ft"), environ)
    child = plan.child_environment(environ)
    assert child["HTTPS_PROXY"] == "http://proxy:3128"
    assert child["NO_PROXY"] == child["no_proxy"] == "corp,127.0.0.1,localhost,::1"


@pytest.mark.parametrize("agent", list(PROVIDERS))
def test_key_is_in_no_argument(agent: str, endpoint: Endpoint) -> None:
    """Other users of the machine can read a process's arguments, not its environment."""
    for options in (LaunchOptions(), LaunchOptions(lean=True, isolated=True)):
        plan = PROVIDERS[agent].plan(["agent"], endpoint, options, Path("/ft"), {})
        assert endpoint.api_key not in " ".join(plan.argv)
        assert endpoint.api_key in plan.env_set.values()


@pytest.mark.parametrize("agent", list(PROVIDERS))
@pytest.mark.parametrize("window", [2_048, 8_192, 32_768, 262_144])
def test_answer_limit_leaves_room_for_the_prompt(agent: str, window: int, endpoint: Endpoint) -> None:
    provider = PROVIDERS[agent]
    small = replace(endpoint, context_window=window)
    output = provider.output_tokens(small, LaunchOptions())
    assert 0 < output <= 8_192
    if window > provider.prompt_tokens(LaunchOptions()) + 512:
        assert output <= (window - provider.prompt_tokens(LaunchOptions())) // 2 + 1
