"""Steps that are begun and finished apart: the order of things, and the same tokens as the model's own reference."""

from __future__ import annotations

import pytest

from ftengine import wire
from ftengine.core import FinishReason, Request, SamplingParams
from ftengine.scheduler.loop import serve
from tests.scheduler.driver import Driver
from tests.scheduler.launching import LaunchingModel
from tests.scheduler.test_engine import BOTH, answers_outgrow_the_cache, prompt
from tests.scheduler.tiny import BOMB, POISON, TinyModel


class ScriptedChannel:
    """Hands out one list of messages a call; afterwards what the loop waits for never comes: the front is gone."""

    def __init__(self, script: list[list], happened: list[str]) -> None:
        self.script = script
        self.happened = happened
        self.sent: list = []

    def receive(self, *, wait: bool) -> list:
        if self.script:
            return self.script.pop(0)
        return [None] if wait else []

    def send(self, messages) -> None:
        self.sent += messages
        if any(isinstance(message, wire.Output) and message.tokens for message in messages):
            self.happened.append("send")


def submit(name: str, tokens: list[int], count: int) -> wire.Submit:
    return wire.Submit(Request(name, tokens, SamplingParams(count, temperature=0.0, ignore_eos=True)))


def said(channel: ScriptedChannel, name: str) -> list[int]:
    return [token for message in channel.sent if message.id == name for token in message.tokens]


def test_the_engine_rests_while_it_waits_for_requests_only() -> None:
    """The prompt cache's tiers are told, for what would hold up steps."""
    model = LaunchingModel(recurrent=False)
    driver = Driver(model)
    driver.engine.rest = lambda idle: model.happened.append(f"rest {idle}")
    channel = ScriptedChannel([[submit("a", [1, 2, 3], 3)]], model.happened)
    assert serve(driver.engine, channel, 5.0) is None
    told = [place for place, what in enumerate(model.happened) if what.startswith("rest")]
    assert [model.happened[place] for place in told] == 2 * ["rest True", "rest False"]
    assert told[:2] == [0, 1]
    assert told[2:] == [len(model.happened) - 2, len(model.happened) - 1]
    assert any("launch" in what for what in model.happened)


def test_tokens_are_sent_while_the_next_step_computes() -> None:
    model = LaunchingModel(recurrent=False)
    channel = ScriptedChannel([[submit("a", prompt(5), 4)]], model.happened)
    assert serve(Driver(model).engine, channel, 5.0) is None
    assert model.happened == ["launch", "collect", *["launch", "send", "collect"] * 3, "send"]
    assert said(channel, "a") == model.greedy(prompt(5), 4)


def test_tokens_of_a_model_on_the_cpu_are_sent_before_it_computes_again() -> None:
    happened: list[str] = []

    class Watched(TinyModel):
        def forward(self, batch, cache):
            happened.append("forward")
            return super().forward(batch, cache)

    model = Watched(recurrent=False)
    channel = ScriptedChannel([[submit("a", prompt(5), 3)]], happened)
    serve(Driver(model).engine, channel, 5.0)
    assert happened == ["forward", "send", "forward", "send", "forward", "send"]
    assert said(channel, "a") == model.greedy(prompt(5), 3)


def test_a_request_that_comes_meanwhile_is_in_the_next_step() -> None:
    model = LaunchingModel(recurrent=False)
    script = [[submit("a", prompt(5), 6)], [], [submit("b", prompt(7, seed=1), 3)], [wire.AskStats(layers=True)]]
    channel = ScriptedChannel(script, model.happened)
    serve(Driver(model).engine, channel, 5.0)
    (stats,) = [message for message in channel.sent if isinstance(message, wire.Stats)]
    assert stats.values["requests"]["running"] == 2
    assert stats.values["experts"] is None
    channel.sent.remove(stats)
    assert model.batches[2] == (2, 8)
    for name, tokens, count in (("a", prompt(5), 6), ("b", prompt(7, seed=1), 3)):
        assert said(channel, name) == model.greedy(tokens, count)


@BOTH
def test_batched_preempted_and_reused_as_alone(recurrent: bool) -> None:
    answers_outgrow_the_cache(LaunchingModel(recurrent=recurrent))


@BOTH
def test_cancelled_between_two_steps(recurrent: bool) -> None:
    """State and pages are whole then: the next request reuses them. The loop hears of it at no other time."""
    model = LaunchingModel(recurrent=recurrent)
    driver = Driver(model, page_size=4)
    driver.submit("gone", prompt(6), 50)
    driver.submit("stays", prompt(9, seed=1), 20)
    driver.submit("last", prompt(3, seed=2), 2)
    for _ in range(6):
        driver.step()
    engine = driver.engine
    engine.begin()
    with pytest.raises(AssertionError, match="while a step computes"):
        engine.cancel("gone")
    driver._take(engine.finish())
    driver.cancel("gone")
    driver.cancel("gone")
    gone = driver.results["gone"]
    assert gone.finish is FinishReason.CANCELLED
    assert engine.stats()["requests"]["cancelled"] == 1
    driver.run()
    assert driver.results["stays"].tokens == model.greedy(prompt(9, seed=1), 20)
    turn = prompt(6) + gone.tokens + prompt(3, seed=4)
    assert driver.one(turn, 6).tokens == model.greedy(turn, 6)


@pytest.mark.parametrize("where", ["launch_error", "collect_error"])
def test_a_step_that_fails_takes_only_its_requests_along(where: str) -> None:
    model = LaunchingModel(recurrent=True)
    driver = Driver(model, running=1)
    driver.submit("bad", prompt(5), 5)
    driver.submit("waits", prompt(6), 5)
    setattr(model, where, ValueError("what for?"))
    driver.step()
    assert "ValueError: what for?" in (driver.results["bad"].error or "")
    assert driver.engine.lost is None
    setattr(model, where, None)
    driver.run()
    assert driver.results["waits"].tokens == model.greedy(prompt(6), 5)


def test_a_failing_row_and_a_bomb() -> None:
    model = LaunchingModel(recurrent=True)
    driver = Driver(model)
    driver.submit("good", prompt(9), 12)
    driver.submit("bad", [*prompt(9), POISON], 12)
    driver.run()
    assert "not numbers" in (driver.results["bad"].error or "")
    assert driver.results["good"].tokens == model.greedy(prompt(9), 12)
    assert "the bomb went off" in (driver.one([*prompt(3), BOMB], 2).error or "")
