"""The four real clients through `ft launch` against `ft serve` with the scripted model: list, read, edit, run, answer.

Everything is real but the model's forward. The user's home, the repository and the environment all point at a fake
cloud, which must not see one connection; a proxy sees whatever else the clients ask of the network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.agents.field import AGENT_TIMEOUT, Field
from tests.support.cloud import FakeCloud
from tests.support.npm import INSTALL_TIMEOUT
from tests.support.serving import FT, SCRIPTED_CHECKPOINT, RunningServer, serve

pytestmark = pytest.mark.timeout(INSTALL_TIMEOUT + 2 * AGENT_TIMEOUT)  # the first test may have to install

COMMANDS = {
    "claude": ("-p", "{prompt}", "--permission-mode", "acceptEdits", "--allowedTools", "Bash,Read,Edit"),
    "codex": ("exec", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
    "opencode": ("run", "{prompt}"),
    "openclaw": ("agent", "--local", "--agent", "main", "-m", "{prompt}"),
}


def arguments(agent: str, field: Field) -> list[str]:
    return [part.format(prompt=field.prompt) for part in COMMANDS[agent]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(SCRIPTED_CHECKPOINT, tmp_path_factory.mktemp("serve")) as server:
        yield server


def assert_cloud_unseen(field: Field, cloud: FakeCloud, proxy: FakeCloud) -> None:
    assert cloud.visits == []
    # OpenCode looks for its provider's package; there is no switch for that.
    assert [visit for visit in proxy.visits if "npm" not in visit] == []
    field.assert_settings_untouched()


@pytest.mark.parametrize("agent", list(COMMANDS))
def test_agent_finishes_task(
    agent: str, field: Field, server: RunningServer, cloud: FakeCloud, proxy: FakeCloud
) -> None:
    before = server.stats()
    outcome = field.launch(agent, "--server", server.url, "--", *arguments(agent, field))
    after = server.stats()
    field.assert_task_done(outcome)
    assert_cloud_unseen(field, cloud, proxy)
    for fault in ("refused", "restarts"):
        assert after[fault] == before[fault], outcome
    # Five requests, each the one before it and a little more: all but the first come from the prefix cache.
    prompt, cached = (after["tokens"][kind] - before["tokens"][kind] for kind in ("prompt", "cached"))
    assert cached > 0.7 * prompt


def test_lean_claude_with_a_server_of_its_own(field: Field, cloud: FakeCloud, proxy: FakeCloud) -> None:
    """Launch starts the server, and the last one to leave stops it."""
    outcome = field.launch("claude", "--model", str(SCRIPTED_CHECKPOINT), "--lean", "--", *arguments("claude", field))
    field.assert_task_done(outcome)
    assert_cloud_unseen(field, cloud, proxy)
    deadline = time.monotonic() + 60
    while (listed := field.run(*FT, "ps")).stdout.count(SCRIPTED_CHECKPOINT.name) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert listed.code == 0, listed
    assert SCRIPTED_CHECKPOINT.name not in listed.stdout


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_fake_cloud_is_reached_without_launch(agent: str, field: Field, cloud: FakeCloud) -> None:
    """What is planted works: started plainly, each of these clients goes to the fake cloud."""
    process = field.start("env", "NO_PROXY=127.0.0.1", agent, *arguments(agent, field))
    deadline = time.monotonic() + 90
    while not cloud.visits and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    outcome = field.end(process)
    assert cloud.visits != [], outcome
