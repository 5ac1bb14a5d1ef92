"""States captured in the middle of a step (Batch.captures), through whole models: layer by layer in torch, and native.

Against the same tokens in steps that end at the captures, and against transformers going on from a captured state.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ftengine.core import Capture, Sequence
from ftengine.kernels import native
from ftengine.models.decoder import Decoder
from ftengine.models.native_decoder import NativeDecoder
from tests.models import driver, tiny

Find = Callable[[str], Path]
WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="no native library"))]
LENGTHS = (150, 1, 70, 33)  # query tokens of the step with captures; the second sequence decodes
SLOTS = 32


def started(model: Decoder) -> tuple[driver.Driver, list[Sequence]]:
    """Sequences of LENGTHS new tokens, of which two have some before."""
    state = driver.Driver(model, slots=SLOTS)
    generator = torch.Generator().manual_seed(3)
    before = (0, 11, 20, 0)
    sequences = [
        state.add(torch.randint(tiny.VOCABULARY, (count + length,), generator=generator).tolist())
        for count, length in zip(before, LENGTHS, strict=True)
    ]
    state.step([(sequence, count) for sequence, count in zip(sequences, before, strict=True) if count])
    return state, sequences


def captures_of(seed: int) -> list[Capture]:
    """At random places, and at some sequences' first and last token."""
    choice, slots = random.Random(seed), iter(range(SLOTS))
    places = [sorted({*choice.sample(range(1, length + 1), min(length, 4)), length}) for length in LENGTHS]
    places[2][0] = 1
    return [Capture(row, tokens, next(slots)) for row, own in enumerate(places) for tokens in own]


def cut(model: Decoder, captures: list[Capture]) -> tuple[list[torch.Tensor], dict[int, list[torch.Tensor]]]:
    """Each sequence in steps of its own that end at its captures: logits of its query tokens, states by slot."""
    state, sequences = started(model)
    logits, states = [], {}
    for row, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        own = {capture.tokens: capture.slot for capture in captures if capture.row == row}
        parts, begin = [], 0
        for end in sorted(own | {length: -1}):
            parts.append(state.step([(sequence, end - begin)]))
            states[own.get(end, -1)] = state.states(sequence.state_slot)
            begin = end
        logits.append(torch.cat(parts))
    return logits, states


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest of all tensors, of each relative to its own size."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("use_native", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captures_equal_steps_that_end_there(checkpoint_of: Find, use_native: bool, dtype: str) -> None:
    """Of four sequences in one step, one of them decoding. The native decoder in float32 sums in the same order however
    many tokens a step has, so no bit differs; torch does not, and bfloat16 may be computed in tiles.
    """
    tolerance = 0.02 if dtype == "bfloat16" else 1e-4
    exact = use_native and dtype == "float32"
    model = driver.load_model(checkpoint_of("qwen3.5"), dtype, native=use_native)
    for seed in range(2):
        captures = captures_of(seed)
        logits, states = cut(model, captures)
        state, sequences = started(model)
        found = state.step(list(zip(sequences, LENGTHS, strict=True)), captures=captures)
        for capture in captures:
            assert difference(state.states(capture.slot), states[capture.slot]) <= (0.0 if exact else tolerance)
        for row, (sequence, part) in enumerate(zip(sequences, found.split(LENGTHS), strict=True)):
            last = max((capture for capture in captures if capture.row == row), key=lambda capture: capture.tokens)
            assert last.tokens == LENGTHS[row]  # so that it equals the sequence's own state
            assert difference(state.states(sequence.state_slot), state.states(last.slot)) == 0.0
            assert (part - logits[row]).norm() < tolerance * logits[row].norm()


@pytest.mark.skipif(not native.AVAILABLE, reason="no native library")
def test_native_equals_torch(checkpoint_of: Find) -> None:
    plain = driver.load_model(checkpoint_of("qwen3.5"), native=False)
    captures, found = captures_of(7), []
    for model in (plain, driver.load_model(checkpoint_of("qwen3.5"))):
        state, sequences = started(model)
        state.step(list(zip(sequences, LENGTHS, strict=True)), captures=captures)
        found.append([tensor for capture in captures for tensor in state.states(capture.slot)])
    assert difference(found[1], found[0]) < 1e-5


@pytest.mark.skipif(not native.AVAILABLE, reason="no native library")
def test_a_step_in_slices_captures_the_same(checkpoint_of: Find) -> None:
    """Slices of 64 tokens: captures at their ends, one after, and in the middle. Against one slice."""
    whole = driver.load_model(checkpoint_of("qwen3.5"))
    sliced = dataclasses.replace(whole, native=NativeDecoder(whole, threads=2, slice_bytes=1))
    places = [(0, 1), (0, 63), (0, 64), (0, 65), (0, 128), (0, 150), (1, 1), (2, 41), (2, 42), (2, 70), (3, 33)]
    captures, found = [Capture(*place, slot) for slot, place in enumerate(places)], []
    for model in (whole, sliced):
        state, sequences = started(model)
        state.step(list(zip(sequences, LENGTHS, strict=True)), captures=captures)
        found.append([state.states(capture.slot) for capture in captures])
    for one, other in zip(*found, strict=True):
        assert difference(other, one) < 1e-5


@pytest.mark.parametrize("use_native", WAYS)
def test_going_on_from_a_capture_equals_transformers(checkpoint_of: Find, use_native: bool) -> None:
    """Another sequence takes over the captured slot and the pages; the rest of the prompt against the whole one's."""
    folder, random_ids = checkpoint_of("qwen3.5"), torch.Generator().manual_seed(9)
    prompt = torch.randint(tiny.VOCABULARY, (90,), generator=random_ids).tolist()
    expected = driver.reference_logits(driver.load_reference(folder), prompt)
    state = driver.Driver(driver.load_model(folder, native=use_native), slots=4)
    first = state.add(prompt)
    captures = [Capture(0, tokens, slot) for slot, tokens in enumerate((2, 37, 89))]
    found = state.step([(first, 90)], captures=captures)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    for capture in captures:
        again = Sequence(first.request, list(prompt), computed=capture.tokens, pages=first.pages)
        again.state_slot = capture.slot
        rest = state.step([(again, 90 - capture.tokens)])
        torch.testing.assert_close(rest, expected[capture.tokens :], atol=1e-3, rtol=0)


@pytest.mark.parametrize("use_native", WAYS)
def test_models_without_states_have_nothing_to_capture(checkpoint_of: Find, use_native: bool) -> None:
    model = driver.load_model(checkpoint_of("qwen3"), native=use_native)
    prompt = list(range(20))
    state = driver.Driver(model)
    found = state.step([(state.add(prompt), 20)], captures=[Capture(0, 5, 3), Capture(0, 20, 40)])
    assert torch.equal(found, driver.prefill_logits(model, prompt))


@pytest.mark.skipif(not native.AVAILABLE, reason="no native library")
def test_captures_that_do_not_fit_are_refused(checkpoint_of: Find) -> None:
    """Before anything is computed, with the reason."""
    model = driver.load_model(checkpoint_of("qwen3.5"))
    for capture, reason in (
        (Capture(1, 1, 0), "row is outside"),
        (Capture(0, 21, 0), "outside its sequence's query tokens"),
        (Capture(0, 0, 0), "outside its sequence's query tokens"),
        (Capture(0, 1, 8), "slot is outside"),
        (Capture(0, 1, 7), "in use"),  # the sequence's own
    ):
        state = driver.Driver(model)
        with pytest.raises(ValueError, match=reason):
            state.step([(state.add(list(range(20))), 20)], captures=[capture])
        assert all(tensor.isnan().all() for tensor in (*state.cache.keys, *state.states(7)))
