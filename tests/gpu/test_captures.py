"""States captured in a step of the device's decoder beside a decoding sequence, against those of torch's decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ftengine.core import Capture
from tests.gpu import models
from tests.gpu.models import load_gpu, prompt_of, setup, start
from tests.models import driver

LONG = 21  # tokens of the prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("qwen3.5", tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def state(folder: Path, device: str) -> Iterator[driver.Driver]:
    model = load_gpu(folder, device)
    model.prepare(setup(max_running=2))
    yield start(model)
    model.close()


def steps(state: driver.Driver) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """A chunk beside a decoding sequence, then the decoding one alone: their logits, and what was captured after each.

    The captures of the second step take the place of the first one's.
    """
    slots = list(state.free_slots)
    short, long = state.add(prompt_of(4, 1)), state.add(prompt_of(LONG, 2))
    logits, found = [state.step([(short, 2)])], []
    for captures in ([Capture(0, 1, slots[0]), Capture(1, 5, slots[1])], [Capture(0, LONG - 6, slots[1])]):
        work = [(short, 1), (long, 6)] if len(captures) == 2 else [(long, LONG - 6), (short, 1)]
        logits.append(state.step(work, captures=captures))
        found += [state.states(capture.slot) for capture in captures]
    found.append(state.states(long.state_slot))
    state.free_slots[:] = slots
    return logits, found


def test_captured_states_equal_the_cpus(folder: Path, state: driver.Driver) -> None:
    logits, found = steps(state)
    other = driver.Driver(driver.load_model(folder, native=False), slots=models.SLOTS)
    expected_logits, expected = steps(other)
    for ours, theirs in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=0)
    for ours, theirs in zip(found, expected, strict=True):
        for one, same in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), same, atol=1e-4, rtol=1e-4)
    # The last place of a chunk is where its sequence stands, to the bit.
    assert all(torch.equal(*pair) for pair in zip(found[-2], found[-1], strict=True))


def test_a_step_of_one_token_captures_as_a_step_with_prefill_does(state: driver.Driver) -> None:
    """Which no graph takes; a graph refuses it."""
    sequence, slots = state.add(prompt_of(3, 4)), list(state.free_slots)
    state.step([(sequence, 2)])
    steps_of = state.model.steps  # type: ignore[attr-defined]
    batch = state._batch([(sequence, 1)])
    assert steps_of.takes(batch)
    batch.captures = [Capture(0, 1, slots[0])]
    assert not steps_of.takes(batch)
    with pytest.raises(AssertionError, match="keeps no states"):
        steps_of.run(batch, state.cache)
    state.step([(sequence, 1)], captures=batch.captures)
    assert all(
        torch.equal(*pair) for pair in zip(state.states(slots[0]), state.states(sequence.state_slot), strict=True)
    )
