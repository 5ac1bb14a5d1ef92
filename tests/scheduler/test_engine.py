"""The engine's tokens against a model's own reference without cache, however requests are batched, cut and reused."""

from __future__ import annotations

import random

import pytest
import torch

from ftengine.core import FinishReason
from tests.scheduler.driver import Driver
from tests.scheduler.tiny import BOMB, POISON, SPECIAL, STARVE, VOCABULARY, TinyModel

BOTH = pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1, VOCABULARY - len(SPECIAL)) for _ in range(length)]


@BOTH
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 37])
@pytest.mark.parametrize("chunk", [4, 8, 64])
def test_tokens_equal_the_reference_whole_and_chunked(recurrent: bool, length: int, chunk: int) -> None:
    model = TinyModel(recurrent=recurrent)
    result = Driver(model, chunk=chunk).one(prompt(length), 12)
    assert result.tokens == model.greedy(prompt(length), 12)
    assert result.finish is FinishReason.LENGTH


def test_the_reference_sees_every_earlier_token() -> None:
    """Else the other tests could not notice a lost page or state."""
    for recurrent in (False, True):
        model = TinyModel(recurrent=recurrent)
        tokens = prompt(40)
        for index in range(40):
            changed = [*tokens[:index], tokens[index] % 50 + 1, *tokens[index + 1 :]]
            assert (model.reference(tokens) - model.reference(changed)).abs().max() > 1e-4


@BOTH
def test_batched_equals_alone(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, pages=200, running=6, chunk=16)
    prompts = {f"r{index}": prompt(3 + 9 * index, seed=index) for index in range(9)}
    for name, tokens in prompts.items():
        driver.submit(name, tokens, 15)
    driver.run()
    assert max(sequences for sequences, _ in model.batches) == 6
    for name, tokens in prompts.items():
        assert driver.results[name].tokens == model.greedy(tokens, 15)


@BOTH
def test_a_long_prefill_does_not_stop_decoding(recurrent: bool) -> None:
    """Checked against the count of tokens: every step of the long prompt gives the decoding request one."""
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, pages=200, chunk=8)
    driver.submit("decoding", prompt(4), 40)
    driver.step()
    driver.step()
    driver.submit("long", prompt(100, seed=1), 4)
    steps = 0
    while not driver.results["long"].tokens:
        before = len(driver.results["decoding"].tokens)
        driver.step()
        steps += 1
        assert len(driver.results["decoding"].tokens) == before + 1
    assert steps >= 100 // 8
    driver.run()
    assert driver.results["decoding"].tokens == model.greedy(prompt(4), 40)
    assert driver.results["long"].tokens == model.greedy(prompt(100, seed=1), 4)


@BOTH
def test_a_short_prompt_overtakes_a_long_prefill(recurrent: bool) -> None:
    driver = Driver(TinyModel(recurrent=recurrent), pages=200, chunk=16)
    driver.submit("long", prompt(200), 1)
    driver.submit("short", prompt(10, seed=1), 1)
    for _ in range(6):
        driver.step()
    assert driver.results["short"].tokens
    assert not driver.results["long"].tokens
    driver.run()


def test_chunks_end_at_page_boundaries_or_at_the_prompts_end() -> None:
    """Where keys and values lie in whole pages. The first prompt leaves the second an odd number of tokens."""
    driver = Driver(TinyModel(recurrent=True), pages=200, page_size=4, chunk=16)
    driver.submit("odd", prompt(3), 1)
    driver.submit("long", prompt(70, seed=1), 1)
    ends = []
    while not driver.results["long"].tokens:
        driver.step()
        ends += [job.sequence.computed for job in driver.engine.scheduler.running]
    assert ends[0] == 12  # of the 13 tokens left
    assert all(end % 4 == 0 for end in ends)


@BOTH
def test_an_answer_and_the_next_turn_reuse_the_prefix(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, page_size=4)
    first = prompt(21)
    answer = driver.one(first, 10)
    assert answer.cached == 0
    again = driver.one(first, 10)
    assert (again.tokens, again.cached) == (answer.tokens, 20)
    turn = first + answer.tokens + prompt(9, seed=3)
    follow = driver.one(turn, 10)
    assert follow.cached == 30  # 21 + 10 tokens, the last of them not computed
    assert follow.tokens == model.greedy(turn, 10)
    assert driver.engine.stats()["tokens"]["cached"] == 50


@BOTH
def test_a_prefix_shared_in_part_is_used_in_part(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, page_size=4, pages=200)
    common = prompt(40)
    driver.one(common + prompt(30, seed=1), 3)
    branch = common + prompt(30, seed=2)
    result = driver.one(branch, 8)
    assert result.cached == (0 if recurrent else 40)  # the recurrent model kept no state in the middle
    assert result.tokens == model.greedy(branch, 8)


@BOTH
def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, page_size=4)
    tokens = prompt(16)  # exactly four pages
    first = driver.one(tokens, 5)
    second = driver.one(tokens, 5)
    assert second.cached == 15
    assert first.tokens == second.tokens == model.greedy(tokens, 5)


@BOTH
def test_cancelled_in_prefill_frees_the_slot_at_once_and_keeps_the_pages(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, pages=100, running=1, chunk=8)
    tokens = prompt(60)
    driver.submit("gone", tokens, 5)
    driver.submit("next", prompt(5, seed=9), 5)
    for _ in range(3):
        driver.step()
    driver.cancel("gone")
    assert driver.results["gone"].finish is FinishReason.CANCELLED
    assert driver.engine.scheduler.running == []
    assert driver.cache.tree.used == 0
    driver.step()
    assert driver.results["next"].outputs
    driver.run()
    again = driver.one(tokens, 6)
    assert again.cached == 24
    assert again.tokens == model.greedy(tokens, 6)


@BOTH
def test_cancelled_in_decode_keeps_what_it_generated(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, page_size=4)
    driver.submit("gone", prompt(6), 50)
    while len(driver.results["gone"].tokens) < 13:
        driver.step()
    driver.cancel("gone")
    driver.run()
    said = driver.results["gone"].tokens
    assert len(said) == 13
    turn = prompt(6) + said + prompt(3, seed=4)
    result = driver.one(turn, 6)
    assert result.cached == 18  # as many tokens as were computed
    assert result.tokens == model.greedy(turn, 6)


def test_cancel_of_a_waiting_and_of_an_unknown_request() -> None:
    driver = Driver(TinyModel(recurrent=True), running=1)
    driver.submit("first", prompt(5), 5)
    driver.submit("second", prompt(6), 5)
    driver.step()
    driver.cancel("second")
    driver.engine.cancel("never heard of")
    assert driver.results["second"].finish is FinishReason.CANCELLED
    driver.run()
    driver.engine.cancel("first")
    assert driver.engine.stats()["requests"] | {"preempted": 0} == {
        "running": 0,
        "waiting": 0,
        "finished": 1,
        "cancelled": 1,
        "failed": 0,
        "preempted": 0,
    }


def answers_outgrow_the_cache(model: TinyModel) -> Driver:
    """Four answers for which there are too few pages: some are preempted, and all come out as if alone."""
    driver = Driver(model, pages=14, page_size=4, running=4)
    prompts = {f"r{index}": prompt(5 + index, seed=index) for index in range(4)}
    for name, tokens in prompts.items():
        driver.submit(name, tokens, 30)
    driver.run()
    assert driver.engine.stats()["requests"]["preempted"] > 0
    for name, tokens in prompts.items():
        assert driver.results[name].tokens == model.greedy(tokens, 30)
    return driver


@BOTH
def test_pages_run_out_in_the_middle_of_answers(recurrent: bool) -> None:
    """Four answers outgrow the cache: the youngest are preempted, and all come out as if alone."""
    driver = answers_outgrow_the_cache(TinyModel(recurrent=recurrent))
    assert all(result.cached == 0 for result in driver.results.values())


def test_a_request_waits_for_pages_and_one_that_never_fits_is_refused() -> None:
    model = TinyModel(recurrent=False)
    driver = Driver(model, pages=16, page_size=4, context=64)
    driver.submit("large", prompt(50), 12)
    driver.submit("waits", prompt(40, seed=1), 5)
    driver.submit("never", prompt(64, seed=2), 5)
    assert driver.results["never"].error == "the prompt has 64 tokens, the context holds 64 with the answer"
    driver.step()
    assert driver.engine.stats()["requests"]["waiting"] == 1
    driver.run()
    assert driver.results["waits"].tokens == model.greedy(prompt(40, seed=1), 5)


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    model = TinyModel(recurrent=True)
    result = Driver(model, pages=16, page_size=4, context=30).one(prompt(20), 1000)
    assert result.tokens == model.greedy(prompt(20), 10)
    assert result.finish is FinishReason.LENGTH


def test_stop_ids_and_end_of_sequence() -> None:
    model = TinyModel(recurrent=True)
    tokens = model.greedy(prompt(7), 12)
    stop = tokens[6]
    expected = tokens[: tokens.index(stop) + 1]
    result = Driver(model).one(prompt(7), 12, stop_token_ids=(stop,))
    assert (result.tokens, result.finish) == (expected, FinishReason.STOP)
    model.eos_token_ids = (stop,)
    result = Driver(model).one(prompt(7), 12, ignore_eos=False)
    assert (result.tokens, result.finish) == (expected, FinishReason.STOP)
    result = Driver(model).one(prompt(7), 12, ignore_eos=True)
    assert (result.tokens, result.finish) == (tokens, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("tokens", "sampling", "says"),
    [
        ([], {}, "empty"),
        ([1, VOCABULARY], {}, "outside the vocabulary"),
        ([1, -1], {}, "outside the vocabulary"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
    ],
)
def test_impossible_requests_are_refused_with_a_sentence(tokens: list[int], sampling: dict, says: str) -> None:
    driver = Driver(TinyModel(recurrent=False))
    driver.submit("bad", tokens, **sampling)
    assert says in (driver.results["bad"].error or "")
    assert not driver.engine.has_work


@BOTH
def test_logits_that_are_not_numbers_fail_that_request_only(recurrent: bool) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model)
    driver.submit("good", prompt(9), 12)
    driver.submit("bad", [*prompt(9), POISON], 12)
    driver.run()
    assert "not numbers" in (driver.results["bad"].error or "")
    assert driver.results["good"].tokens == model.greedy(prompt(9), 12)


@BOTH
def test_what_led_to_nan_is_forgotten_and_erased(recurrent: bool) -> None:
    """NaN is planted in cached pages, as a chunk of a cancelled request may leave it; the next request finds it."""
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model)
    tokens = prompt(20)
    driver.one(tokens, 4)
    for node in driver.cache.tree.nodes():
        driver.cache.tensors.values[0][node.page] = torch.nan
    assert "not numbers" in (driver.one(tokens, 4).error or "")
    assert driver.cache.tree.size == 0
    assert not driver.cache.tensors.values[0].isnan().any()
    assert driver.one(tokens, 4).tokens == model.greedy(tokens, 4)


@BOTH
@pytest.mark.parametrize(
    ("token", "says", "overloaded"), [(BOMB, "the bomb went off", False), (STARVE, "memory", True)]
)
def test_a_forward_that_raises_fails_its_batch_and_the_engine_goes_on(
    recurrent: bool, token: int, says: str, overloaded: bool
) -> None:
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, running=4)
    driver.submit("bystander", prompt(9), 30)
    driver.step()
    driver.submit("bad", [*prompt(5), token], 4)
    driver.run()
    for name in ("bystander", "bad"):
        assert says in (driver.results[name].error or "")
        assert driver.results[name].overloaded is overloaded
    assert driver.one(prompt(9), 6).tokens == model.greedy(prompt(9), 6)


def test_seeded_sampling_does_not_depend_on_the_batch_or_on_preemption() -> None:
    model = TinyModel(recurrent=True)
    sampling = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    alone = Driver(model).one(prompt(9), 25, **sampling).tokens
    assert alone != Driver(model).one(prompt(9), 25, **{**sampling, "seed": 12}).tokens
    crowded = Driver(model, pages=17, running=4, chunk=4)
    for index in range(3):
        crowded.submit(f"other{index}", prompt(6, seed=index + 1), 30, temperature=0.8, top_k=5)
    crowded.submit("mine", prompt(9), 25, **sampling)
    crowded.run()
    assert crowded.engine.stats()["requests"]["preempted"] > 0
    assert crowded.results["mine"].tokens == alone


def test_the_waiting_line_has_an_end() -> None:
    driver = Driver(TinyModel(recurrent=False), running=1)
    for index in range(1025):
        driver.submit(f"r{index}", [1], 1)
    assert driver.results["r1024"].overloaded
    assert "1024 requests are waiting" in (driver.results["r1024"].error or "")


def test_warm_up_leaves_no_trace() -> None:
    driver = Driver(TinyModel(recurrent=True))
    driver.engine.warm_up()
    driver.engine.scheduler.check_integrity()
    assert driver.cache.pages.used_count == driver.cache.slots.used_count == 0
    assert driver.engine.stats()["requests"]["finished"] == 0
    assert driver.model.batches
