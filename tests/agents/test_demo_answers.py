"""The real clients answered by the demo model: real weights, real forward, 8,192 tokens of context.

The model is small, but it knows this answer even behind thousands of tokens of tools and instructions, as long as all
of them are computed rightly. A client whose prompt cannot fit is told so before it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.field import Field
from tests.support.npm import INSTALL_TIMEOUT
from tests.support.serving import RunningServer, serve

PREFILL_TIMEOUT = 420  # seconds; thousands of tokens, and perhaps on cores that others use too
pytestmark = pytest.mark.timeout(INSTALL_TIMEOUT + PREFILL_TIMEOUT)  # the first test may have to install

QUESTION = "What is the capital of France? Answer with one word."
COMMANDS = {
    "claude": ("--lean", "--", "-p", QUESTION),
    "codex": ("--", "exec", "--dangerously-bypass-approvals-and-sandbox", QUESTION),
    "opencode": ("--", "run", QUESTION),
}


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(demo_model, tmp_path_factory.mktemp("serve"), "--max-output-tokens", "16") as server:
        yield server


@pytest.mark.parametrize("agent", list(COMMANDS))
def test_agent_gets_an_answer(agent: str, field: Field, server: RunningServer) -> None:
    before = server.stats()
    outcome = field.launch(agent, "--server", server.url, *COMMANDS[agent], seconds=PREFILL_TIMEOUT)
    after = server.stats()
    assert outcome.code == 0, outcome
    assert "Paris" in outcome.stdout, outcome
    assert after["tokens"]["output"] > before["tokens"]["output"]
    for fault in ("refused", "restarts"):
        assert after[fault] == before[fault], outcome


def test_agent_that_cannot_fit_is_refused_with_both_numbers(field: Field, server: RunningServer) -> None:
    outcome = field.launch("openclaw", "--server", server.url, "--", "agent", "--local", "-m", QUESTION)
    assert outcome.code != 0, outcome
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{3,}", outcome.stderr)]
    assert 8192 in numbers, outcome
    assert any(number > 8192 for number in numbers), outcome
