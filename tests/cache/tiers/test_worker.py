"""The tiers' thread after a fault: it goes on, or ends with every ticket done; nothing waits for ever."""

from __future__ import annotations

import pytest

from ftengine.cache.tiers.worker import CLOSED, Worker
from tests.cache.tiers.device import HYBRID, open_bench, prompt, until


def broken() -> bool:
    raise ValueError("broken")


def test_a_job_that_fails_costs_no_other_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    bench = open_bench(HYBRID)
    bench.tiers._worker.put(broken)
    tokens = prompt(700)
    bench.keep(tokens)
    found = bench.find(tokens)
    assert found is not None
    assert bench.restore(tokens, found).tokens == 700
    assert "broken" in caplog.text
    assert "goes on" in caplog.text
    bench.close()


def test_what_is_done_meanwhile_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """It is not tried again and again, but whenever there is time."""
    done: list[str] = []
    worker = Worker(lambda: None, lambda: bool(done.append("meanwhile")) or broken())
    worker.start()
    for number in range(1, 4):
        worker.put(lambda: done.append("job"))
        until(lambda number=number: done.count("job") == number and done[-1] == "meanwhile")
    assert done.count("meanwhile") <= 4
    assert "broken" in caplog.text
    worker.close(60.0)
    assert worker.ended


class Gone(BaseException):
    """What no thread is to go on after."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_no_ticket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in its queues, those that it has not taken yet, and one that comes when it is over."""
    bench = open_bench(HYBRID)
    tokens = prompt(700)
    bench.keep(tokens)
    found = bench.find(tokens)
    assert found is not None
    worker, tickets = bench.tiers._worker, []

    def end() -> None:
        tickets.append(bench.keep(prompt(600, 1), wait=False))
        tickets.append(bench.tiers.restore(found, b"", 0, bench.target(700), 1))
        raise Gone

    tickets.append(bench.keep(prompt(600, 2), wait=False))
    worker.put(end)
    until(lambda: worker.ended)
    tickets.append(bench.tiers.restore(found, b"", 0, bench.target(700), 1))
    assert all(ticket is not None and ticket.done for ticket in tickets)
    assert tickets[-1].reason == CLOSED
    assert tickets[-1].tokens == 0
    bench.tiers.close(60.0)
