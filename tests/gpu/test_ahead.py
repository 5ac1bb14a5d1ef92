"""Steps launched ahead: the same answers as without, from a device that lags behind or hurries; nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from ftengine.cache.node import Anchor
from ftengine.core import FinishReason
from ftengine.scheduler import device_sampler
from ftengine.scheduler.device_sampler import DeviceSampler
from ftengine.scheduler.sampler import draw_from_all
from tests.gpu import models
from tests.gpu.ahead_model import AheadModel, QueuedSampler
from tests.gpu.test_step_faults import DeviceDriver
from tests.scheduler.driver import Driver
from tests.scheduler.tiny import BOMB, POISON

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 1},
]


class Watched(Driver):
    """Its cache's copies wait their turn in the device's stream; anchors are compared with their tokens."""

    def __init__(self, model: AheadModel, **options) -> None:
        super().__init__(model, **options)
        self.engine.device_sampler = QueuedSampler(model)
        self.seen: set[Anchor] = set()
        storage = self.cache.storage
        for name in ("copy_state", "copy_pages", "erase_page", "erase_slot"):
            setattr(storage, name, self._in_turn(getattr(storage, name)))

    def _in_turn(self, call):
        def later(*arguments) -> None:
            self.model.drain()
            call(*arguments)

        return later

    def step(self) -> None:
        super().step()
        self.engine.scheduler.check_integrity()
        for anchor in self.cache.tree.anchors - self.seen if self.model.recurrent else ():
            # What was handed on may be of a step that is still under way.
            self.model.drain()
            self.seen.add(anchor)
            path = [each.tokens for each in list(anchor.node.path())[::-1]]
            tokens = numpy.frombuffer(b"".join([*path, anchor.tail]), "<i4").tolist()
            states = self.cache.tensors.states[0]
            for found, expected in zip((states["sum"], states["last"]), self.model.state_after(tokens), strict=True):
                torch.testing.assert_close(found[anchor.slot], expected)


def script(seed: int) -> list[tuple]:
    """(step number, "submit", name, prompt, count, sampling) and (step number, "cancel", name), before that step."""
    chance = random.Random(seed)
    stem = [chance.randrange(1, 50) for _ in range(12)]
    actions: list[tuple] = []
    for index in range(chance.randint(1, 8)):
        at, name = chance.choice([0, 0, chance.randrange(40)]), f"r{index}"
        prompt = stem[: chance.randrange(12)] + [chance.randrange(1, 50) for _ in range(chance.randint(1, 9))]
        if chance.random() < 0.1:
            prompt[-1] = chance.choice([POISON, BOMB])
        sampling = {**chance.choice(KINDS[:3] if chance.random() < 0.9 else KINDS), "seed": index}
        sampling["stop_token_ids"] = chance.sample(range(1, 55), chance.choice([0, 0, 1, 4]))
        actions.append((at, "submit", name, prompt, chance.randint(1, 40), sampling))
        if chance.random() < 0.2:
            actions.append((at + chance.randint(0, 30), "cancel", name))
    return sorted(actions, key=lambda action: action[0])


def played(seed: int, monkeypatch: pytest.MonkeyPatch, ahead: str) -> Watched:
    monkeypatch.setenv("FT_AHEAD", ahead)
    chance = random.Random(seed)
    running, pages = chance.choice([1, 2, 4, 8]), chance.choice([20, 40, 200])
    model = AheadModel(timing=seed, recurrent=chance.random() < 0.7)
    driver = Watched(model, running=running, pages=pages, page_size=4, slots=running + chance.randint(1, 6), spacing=12)
    actions, number = script(seed), 0
    while actions or driver.engine.has_work:
        while actions and actions[0][0] <= number:
            _, what, name, *rest = actions.pop(0)
            if what == "submit":
                driver.submit(name, *rest[:2], **rest[2])
            else:
                driver.cancel(name)
        driver.step()
        number += 1
        assert number < 5000
    driver.engine.scheduler.check_idle()
    assert model.under_way == 0
    return driver


@pytest.mark.parametrize("part", range(4))
def test_answers_are_those_of_steps_one_by_one(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = 0
    for seed in range(5 * part, 5 * part + 5):
        plain, ahead = (played(seed, monkeypatch, value) for value in "01")
        assert plain.model.ahead == 0
        launched += ahead.model.ahead
        for name, expected in plain.results.items():
            found = ahead.results[name]
            if "cancelled" in {str(getattr(each.finish, "value", "")) for each in (found, expected)}:
                shared = min(len(found.tokens), len(expected.tokens))
                assert found.tokens[:shared] == expected.tokens[:shared], (seed, name)
            elif expected.error or found.error:
                # A request fails with whoever shares its step; which those are depends on when it came.
                assert "bomb" in (expected.error or found.error) or expected.error == found.error, (seed, name)
            else:
                assert (found.tokens, found.finish) == (expected.tokens, expected.finish), (seed, name)
        counts = ahead.engine.stats()["requests"]
        ends = counts["finished"] + counts["cancelled"] + counts["failed"]
        assert ends == len(ahead.results), seed
    assert launched > 30


def test_most_steps_of_a_long_answer_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first, and those after an anchor was due: at 16, 32 and 48 tokens after the prompt's own."""
    monkeypatch.delenv("FT_AHEAD", raising=False)
    model = AheadModel(timing=1, recurrent=True)
    driver = Watched(model, page_size=8, spacing=16)
    assert driver.one([3, 4, 5], 60).tokens == model.greedy([3, 4, 5], 60)
    assert model.ahead == 59 - 1 - 3
    assert driver.engine.stats()["steps"]["count"] == 60


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_where_an_answer_ends_is_kept_with_its_last_token(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step launched ahead computes it; the client has its answer before. The next turn computes what is new."""
    monkeypatch.delenv("FT_AHEAD", raising=False)
    for recurrent in (False, True):
        model = AheadModel(timing=3, recurrent=recurrent)
        driver = Watched(model)
        prompt = [3, 4, 5, 6, 7]
        answer = model.greedy(prompt, 12)
        other = driver.model.greedy([9, 8], 30)
        driver.submit("other", [9, 8], 30)
        driver.submit("first", prompt, 40, stop_token_ids=(answer[11],) if end == "stop" else ())
        while len(driver.results["first"].tokens) < 12 and driver.results["first"].finish is None:
            driver.step()
        if end == "cancel":
            driver.cancel("first")
        said = driver.results["first"].tokens
        assert driver.results["first"].finish is not None
        assert len(driver.engine.scheduler.parting) == 1
        driver.run()
        turn = prompt + said + [11, 12]
        driver.submit("next", turn, 5)
        driver.run()
        assert driver.results["next"].cached == len(prompt) + len(said)
        assert driver.results["next"].tokens == model.greedy(turn, 5)
        assert driver.results["other"].tokens == other


def test_a_token_left_to_the_host_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence begins anew from the cache, with the random numbers that it would have had."""
    answers = []
    for value in "01":
        monkeypatch.setenv("FT_AHEAD", value)
        driver = Watched(AheadModel(timing=2, recurrent=True))
        answers.append(driver.one([3, 4, 5], 60, temperature=1.0, top_p=0.9, seed=3).tokens)
        assert (driver.model.ahead > 0) == (value == "1")
        assert driver.engine.scheduler.preemptions == int(value)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_token_left_to_the_host_may_be_a_stop_token(
    seed: int, recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer ends as without steps ahead; what the wrong step computed is in no prefix of the next turn."""
    drawn: list[int] = []
    monkeypatch.setattr(
        device_sampler, "draw_from_all", lambda *given: drawn.append(draw_from_all(*given)) or drawn[-1]
    )
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": seed}

    def driver(ahead: str) -> Watched:
        monkeypatch.setenv("FT_AHEAD", ahead)
        return Watched(AheadModel(timing=2, recurrent=recurrent))

    driver("0").one([3, 4, 5], 60, **sampling)
    stop = drawn[0]
    answers = []
    for ahead in "01":
        ending = driver(ahead)
        found = ending.one([3, 4, 5], 60, stop_token_ids=(stop,), **sampling)
        answers.append((found.tokens, found.finish))
        ending.engine.scheduler.check_idle()
        turn = [3, 4, 5, *found.tokens, 11]
        assert ending.one(turn, 5).tokens == ending.model.greedy(turn, 5)
    assert answers[0] == answers[1]
    assert answers[1][1] is FinishReason.STOP
    assert ending.model.ahead > 0


def test_the_decoder_answers_as_without(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.load_gpu(models.write("qwen3.5", tmp_path / "checkpoint"), device)
    model.prepare(models.setup("resident"))
    launched, answers = [0, 0], []
    original = model.launch_ahead
    try:
        for value in "01":

            def launch_ahead(*arguments, value=value):
                launched[int(value)] += 1
                return original(*arguments)

            monkeypatch.setenv("FT_AHEAD", value)
            monkeypatch.setattr(model, "launch_ahead", launch_ahead)
            driver = DeviceDriver(model, device)
            driver.engine.device_sampler = DeviceSampler(model.vocab_size, 3, model.device)
            driver.submit("greedy", models.prompt_of(3), 9)
            driver.submit("drawn", models.prompt_of(4, seed=1), 9, temperature=1.0, seed=3)
            driver.submit("likely", models.prompt_of(4, seed=2), 7, temperature=1.0, seed=3, top_k=5)
            driver.run()
            answers.append([driver.results[name].tokens for name in ("greedy", "drawn", "likely")])
    finally:
        model.close()
    assert launched[0] == 0
    assert launched[1] > 2
    assert answers[0] == answers[1]
