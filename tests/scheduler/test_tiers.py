"""Requests whose prefixes come from lower tiers and go there, against the model's own reference without any cache."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from ftengine import wire
from ftengine.core import Boundary, BoundaryKind, FinishReason, Request, SamplingParams, SequenceStatus
from ftengine.scheduler.channel import Channel
from ftengine.scheduler.loop import serve
from tests.cache.fake_tiers import FakeTiers
from tests.scheduler.driver import Driver
from tests.scheduler.test_engine import BOTH, prompt
from tests.scheduler.tiny import SPECIAL, VOCABULARY, TinyModel


def with_tiers(model: TinyModel, *, failing: float = 0.0, seed: int = 0, **options) -> tuple[Driver, FakeTiers]:
    driver = Driver(model, **options)
    tiers = driver.cache.tiers = FakeTiers(driver.cache.tensors, failing=failing, seed=seed)
    return driver, tiers


def run(driver: Driver, tiers: FakeTiers) -> None:
    """Transfers end as soon as they may."""
    while driver.engine.has_work:
        driver.step()
        tiers.pump(100)
    driver.engine.admit()
    driver.engine.scheduler.check_integrity()
    driver.engine.scheduler.check_idle()


@BOTH
def test_what_the_device_forgot_comes_back(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver, tiers = with_tiers(model, pages=200)
    tokens = prompt(100)
    driver.submit("first", tokens, 6)
    run(driver, tiers)
    driver.cache.store.clear()
    assert driver.cache.pages.used_count == driver.cache.slots.used_count == 0
    turn = tokens + driver.results["first"].tokens + prompt(5, seed=1)
    driver.submit("next", turn, 8)
    driver.step()
    assert driver.engine.stalled
    assert driver.results["next"].outputs == 0
    assert driver.engine.scheduler.running[0].sequence.status is SequenceStatus.RESTORING
    run(driver, tiers)
    result = driver.results["next"]
    assert result.tokens == model.greedy(turn, 8)
    assert result.cached == 105
    assert result.reused is not None
    assert result.reused.tier in ("host", "disk")
    assert result.reused.tokens == result.cached
    assert result.reused.changed == 105
    assert result.reused.kind is (BoundaryKind.ANSWER_END if recurrent else None)


@BOTH
def test_others_go_on_while_one_is_restored(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver, tiers = with_tiers(model, pages=200)
    tokens = prompt(80)
    driver.submit("first", tokens, 1)
    run(driver, tiers)
    driver.cache.store.clear()
    driver.submit("decodes", prompt(6, seed=2), 30)
    driver.step()
    driver.submit("restores", tokens, 4)
    for _ in range(10):
        driver.step()
        assert not driver.engine.stalled
    assert driver.results["restores"].outputs == 0
    assert len(driver.results["decodes"].tokens) == 11
    run(driver, tiers)
    assert driver.results["restores"].cached == 79
    assert driver.results["restores"].tokens == model.greedy(tokens, 4)
    assert driver.results["decodes"].tokens == model.greedy(prompt(6, seed=2), 30)


@BOTH
def test_cancelled_while_it_is_restored(recurrent: bool) -> None:
    """Its pages and slot are not free before the transfer has ended; what came is kept."""
    model = TinyModel(recurrent=recurrent)
    driver, tiers = with_tiers(model, pages=200)
    tokens = prompt(80)
    driver.submit("first", tokens, 1)
    run(driver, tiers)
    driver.cache.store.clear()
    driver.submit("gone", tokens, 4)
    driver.step()
    driver.cancel("gone")
    assert driver.results["gone"].finish is FinishReason.CANCELLED
    assert not driver.engine.has_work
    assert driver.cache.pages.used_count >= 20
    driver.engine.scheduler.check_idle()
    driver.engine.scheduler.check_integrity()
    tiers.pump(100)
    driver.engine.admit()
    driver.engine.scheduler.check_integrity()
    tiers.records.clear()
    again = driver.one(tokens, 4)
    assert again.cached == 79
    assert again.reused is not None
    assert again.reused.tier == "device"
    assert again.tokens == model.greedy(tokens, 4)


@BOTH
def test_a_restore_that_fails_falls_back_on_the_device(recurrent: bool) -> None:
    """The device still has the first page's worth; what was promised beyond it does not come, or comes in part."""
    model = TinyModel(recurrent=recurrent)
    driver, tiers = with_tiers(model, pages=200, failing=1.0)
    tokens = prompt(120)
    driver.submit("first", tokens, 1, request={"boundaries": [Boundary(50, BoundaryKind.SYSTEM)]})
    run(driver, tiers)
    while driver.cache.tree.size > 12:  # of 50 tokens, 48 are whole pages, and two in the companion
        assert driver.cache.store.evict_page()
    driver.submit("again", tokens, 6)
    driver.step()
    assert driver.engine.stalled
    run(driver, tiers)
    result = driver.results["again"]
    assert result.tokens == model.greedy(tokens, 6)
    assert tiers.restored == 0
    if recurrent:
        assert (result.cached, result.reused.tier, result.reused.kind) == (50, "device", BoundaryKind.SYSTEM)
    else:
        assert result.cached >= 48


def test_pages_that_copies_read_stop_nobody_for_good() -> None:
    """A copy that is not made yet holds all pages: the next request waits, the copy is told, and then it goes on."""
    model = TinyModel(recurrent=False)
    driver, tiers = with_tiers(model, pages=16, context=64)
    driver.submit("first", prompt(60), 1)
    while driver.engine.has_work:
        driver.step()
    assert driver.cache.copying
    driver.submit("next", prompt(60, seed=1), 4)
    driver.step()
    assert driver.engine.stalled
    assert all(copy.ticket.unwanted for copy in driver.cache.keeper.copies)
    run(driver, tiers)
    assert driver.results["next"].tokens == model.greedy(prompt(60, seed=1), 4)


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
@pytest.mark.parametrize(
    ("pages", "slots", "page_size", "running"), [(24, 6, 4, 4), (60, 20, 4, 6), (19, 8, 5, 3), (40, 5, 4, 2)]
)
def test_random_requests_with_tiers_that_lag_and_fail(
    recurrent: bool, pages: int, slots: int, page_size: int, running: int
) -> None:
    """Admitted, cancelled, preempted, restored and copied at random times; the books are checked after each step."""
    chance = random.Random(pages)
    model = TinyModel(recurrent=recurrent)
    driver, tiers = with_tiers(
        model, failing=0.2, seed=pages, pages=pages, slots=slots, page_size=page_size, running=running,
        chunk=6 * page_size, spacing=9,
    )  # fmt: skip
    context = driver.engine.scheduler.limits.context
    stems = [[chance.randrange(1, VOCABULARY - len(SPECIAL)) for _ in range(60)] for _ in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    while len(asked) < 60 or driver.engine.has_work:
        if len(asked) < 60 and chance.random() < 0.4:
            name = f"r{len(asked)}"
            tokens = chance.choice(stems)[: chance.randrange(1, 61)]
            if asked and chance.random() < 0.5:
                before = chance.choice(list(asked))
                tokens = asked[before][0] + driver.results[before].tokens
            tokens = [*tokens, *(chance.randrange(1, 50) for _ in range(chance.randrange(1, 12)))][-(context - 1) :]
            places = sorted(chance.sample(range(1, len(tokens) + 1), min(len(tokens), chance.randrange(5))))
            request = {
                "boundaries": [Boundary(at, chance.choice(list(BoundaryKind))) for at in places],
                "boundary_tokens": tuple(chance.sample(range(50), 3)),
                "session": chance.choice(["", "a", "b"]),
                "side": chance.random() < 0.3,
            }
            asked[name] = tokens, chance.randrange(1, 16)
            driver.submit(name, *asked[name], request=request)
        if asked and chance.random() < 0.1:
            driver.cancel(chance.choice(list(asked)))
        driver.step()
        driver.engine.scheduler.check_integrity()
        tiers.pump(chance.choice([0, 0, 1, 2, 9]))
        if driver.engine.stalled and not chance.randrange(3):
            tiers.pump(1)
        if chance.random() < 0.05:
            tiers.records.pop(chance.choice([*tiers.records, b""]), None)
    for name, (tokens, count) in asked.items():
        result, expected = driver.results[name], model.greedy(tokens, min(count, context - len(tokens)))
        assert result.tokens == expected[: len(result.tokens)], name
        assert len(result.tokens) == len(expected) or result.finish is FinishReason.CANCELLED
    assert tiers.restored > 1
    tiers.pump(1000)
    driver.engine.admit()
    driver.engine.scheduler.check_idle()
    driver.cache.clear()
    assert driver.cache.pages.used_count == driver.cache.slots.used_count == driver.cache.tree.size == 0


def test_the_loop_sleeps_while_something_is_restored_and_a_transfer_wakes_it() -> None:
    """The whole loop over a socket; between the wait's begin and the transfer's end it asks for nothing."""
    model = TinyModel(recurrent=True)
    driver, tiers = with_tiers(model, pages=200)
    tokens = prompt(80)
    driver.submit("first", tokens, 1)
    run(driver, tiers)
    driver.cache.store.clear()
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    tiers.wake = channel.wake
    rounds = 0
    admit = driver.engine.admit

    def counted():
        nonlocal rounds
        rounds += 1
        return admit()

    driver.engine.admit = counted
    loop = threading.Thread(target=serve, args=(driver.engine, channel, 60.0))
    channel.start()
    loop.start()
    params = SamplingParams(4, temperature=0.0, ignore_eos=True)
    theirs.sendall(wire.encode(wire.Submit(Request("restores", tokens, params))))
    while not tiers.queued:
        time.sleep(0.01)
    time.sleep(0.2)
    assert rounds == 1
    tiers.pump(1)
    said, reader = [], theirs.makefile("rb")
    while not said or said[-1].finish is None:
        (length,) = wire.HEADER.unpack(reader.read(wire.HEADER.size))
        said.append(wire.decode_to_front(reader.read(length)))
    assert (said[0].tokens, said[0].cached_tokens, said[0].reused.tokens) == ([], 79, 79)
    assert all(message.reused is None for message in said[1:])
    assert [token for message in said for token in message.tokens] == model.greedy(tokens, 4)
    theirs.shutdown(socket.SHUT_RDWR)
    loop.join(10)
    assert not loop.is_alive()
    reader.close()
    theirs.close()
    ours.close()


def test_who_is_short_of_a_page_that_a_copy_reads_waits_and_is_not_preempted() -> None:
    model = TinyModel(recurrent=False)
    driver, tiers = with_tiers(model, pages=16, context=64)
    driver.submit("first", prompt(40), 1)
    while driver.engine.has_work:
        driver.step()
    driver.submit("next", prompt(10, seed=1), 30)
    while not driver.engine.stalled:
        driver.step()
    assert driver.cache.copying
    assert driver.engine.scheduler.preemptions == 0
    said = len(driver.results["next"].tokens)
    assert 0 < said < 30
    driver.step()
    assert len(driver.results["next"].tokens) == said
    run(driver, tiers)
    assert driver.engine.scheduler.preemptions == 0
    assert driver.results["next"].tokens == model.greedy(prompt(10, seed=1), 30)


def test_where_an_answer_ends_is_known_as_that_also_after_a_boundary() -> None:
    """One anchor, kept once, as the answer's end: a copy for the boundary before would be for nothing."""
    model = TinyModel(recurrent=True)
    driver, tiers = with_tiers(model)
    answer = model.greedy(prompt(20), 6)
    driver.submit("ends", prompt(20), 6, request={"boundary_tokens": (answer[4],)})
    run(driver, tiers)
    kinds = {len(kept.tokens) // 4: kept.kind for kept in tiers.kept}
    assert kinds[25] is BoundaryKind.ANSWER_END
    assert kinds[19] is BoundaryKind.PROMPT_END
    assert len(tiers.kept) == len(kinds)
