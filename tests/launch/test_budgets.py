"""What a launch says of a server whose prompt cache is not as it asked for; against answers of /v1/stats."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ftengine.errors import FtError
from ftlaunch.launch import budgets
from ftlaunch.launch.request import LaunchRequest, Talk
from ftlaunch.servers import ServerRecord

RECORD = ServerRecord("id", 1, "127.0.0.1", 1919, "demo", "demo", None, 0.0, None, None)
FACTS = {
    "cache_device": {"value": 1 << 30, "reason": "asked for"},
    "cache_host": {"value": 0, "reason": "on the CPU"},
    "cache_disk": {"value": 20 * 10**9, "reason": "default"},
}


def said_of(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None, **asked: int) -> list[str]:
    monkeypatch.setattr("ftlaunch.servers.ask.ask", lambda record, path, timeout: answer)
    said: list[str] = []
    request = LaunchRequest("claude", Path(), {}, **asked)
    budgets.check(request, RECORD, Talk(said.append, nullcontext, lambda question: False))
    return said


def test_nothing_is_said_of_what_is_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_of(monkeypatch, {"facts": FACTS}, cache_device=1 << 30, cache_host=0, cache_disk=20 * 10**9) == []
    assert said_of(monkeypatch, None) == []


def test_other_sizes_are_said_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = said_of(monkeypatch, {"facts": FACTS}, cache_device=1 << 29, cache_host=1 << 30)
    again = "To change it: ft stop 1919, then launch again"
    assert device == f"The server of demo has --cache-device 1.00 GiB (asked for), not 0.50 GiB. {again}"
    assert host == f"The server of demo has --cache-host 0.00 GiB (on the CPU), not 1.00 GiB. {again}"


@pytest.mark.parametrize("answer", [None, {}, {"facts": None}, {"facts": {"cache_disk": 7}}, {"facts": FACTS}])
def test_where_no_prompt_may_be_on_the_disk_only_a_server_that_says_so_is_used(
    answer: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FtError, match="may keep prompts on the disk, --cache-disk 0 forbids it") as told:
        said_of(monkeypatch, answer, cache_disk=0)
    assert told.value.next_step == "ft stop 1919, then launch again"
    none = {"facts": {"cache_disk": {"value": 0, "reason": "asked for"}}}
    assert said_of(monkeypatch, none, cache_disk=0) == []


@pytest.mark.parametrize("answer", [None, {}, {"facts": []}, {"facts": {"cache_host": {"value": "x"}}}])
def test_a_server_that_does_not_tell(answer: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = said_of(monkeypatch, answer, cache_host=1 << 30)
    assert said.startswith("The server of demo has --cache-host another size, not 1.00 GiB.")


def test_servers_of_others_are_as_they_are() -> None:
    said: list[str] = []
    talk = Talk(said.append, nullcontext, lambda question: False)
    budgets.unused(LaunchRequest("claude", Path(), {}), "http://x", talk)
    assert said == []
    budgets.unused(LaunchRequest("claude", Path(), {}, cache_host=5, cache_disk=0), "http://x", talk)
    assert said == [
        "The server at http://x keeps prompts as it was told at its start; "
        "--cache-host and --cache-disk cannot change that"
    ]
