"""Gated DeltaNet against the float64 recurrence, token by token (mixer_cases.py)."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch

from ftengine.core import Capture
from ftengine.kernels import mixers
from tests.kernels.mixer_cases import NAN, DeltaCase

MIXED = [(1, 0), (3, 0), (1, 9), (64, 5), (70, 0), (1, 2), (2, 1), (129, 7)]


def run(
    case: DeltaCase,
    dtype: torch.dtype = torch.float32,
    threads: int = 2,
    isa: str = "",
    captures: Sequence[Capture] = (),
) -> torch.Tensor:
    """Changes the case's window and state."""
    layer = mixers.DeltaNet(case.taps, case.decay_scale, case.decay_bias, case.norm, case.epsilon)
    lengths, contexts = ([part[i] for part in case.parts] for i in (0, 1))
    places = [(capture.row, capture.tokens, capture.slot) for capture in captures]
    return mixers.delta_net(
        layer, case.projected, lengths, contexts, case.slots, case.window, case.state, dtype, threads, isa, places
    )


def check(case: DeltaCase, found: torch.Tensor, expected: tuple[torch.Tensor, ...], tolerance: float) -> None:
    out, window, state = expected
    torch.testing.assert_close(found[:, : out.shape[1]].double(), out, rtol=tolerance, atol=tolerance)
    assert not found[:, out.shape[1] :].any()
    used = case.slots
    assert torch.equal(case.window[used].double(), window[used])
    torch.testing.assert_close(case.state[used].double(), state[used], rtol=tolerance, atol=tolerance)
    spare = [slot for slot in range(len(case.state)) if slot not in used.tolist()]
    assert case.state[spare].isnan().all()
    assert case.window[spare].isnan().all()


# Key heads, value heads, key dimensions, value dimensions, taps.
SHAPES = [(2, 4, 32, 32, 4), (1, 3, 20, 9, 4), (3, 3, 16, 48, 2), (2, 2, 128, 128, 4), (1, 2, 8, 8, 1)]


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_batch(isa: str, shape: tuple[int, ...]) -> None:
    case = DeltaCase(MIXED, *shape, extra=shape[3] % 5)
    expected = case.expected()
    check(case, run(case, isa=isa), expected, 2e-4)


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("decay", [0.0, 1e-4, 30.0, 1000.0])
def test_decays_from_none_to_total(isa: str, decay: float) -> None:
    case = DeltaCase([(100, 0), (1, 3), (80, 2)], 1, 2, 32, 32, decay=decay)
    expected = case.expected()
    check(case, run(case, isa=isa), expected, 5e-4)


def test_bfloat16_output() -> None:
    case = DeltaCase(MIXED, 2, 4, 32, 32)
    out, _, _ = case.expected()
    found = run(case, torch.bfloat16)
    torch.testing.assert_close(found.double(), out, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("isa", mixers.versions())
def test_chunks_equal_single_steps(isa: str) -> None:
    chunks = DeltaCase([(100, 0)], 2, 4, 32, 32)
    steps = copy.deepcopy(chunks)
    expected = run(chunks, isa=isa)
    tokens = steps.projected
    for t in range(100):
        steps.projected, steps.parts = tokens[t : t + 1], [(1, t)]
        torch.testing.assert_close(run(steps, isa=isa), expected[t : t + 1], rtol=1e-4, atol=1e-4)
    used = int(chunks.slots[0])
    torch.testing.assert_close(steps.state[used], chunks.state[used], rtol=1e-4, atol=1e-5)
    assert torch.equal(steps.window[used], chunks.window[used])


@pytest.mark.parametrize("isa", mixers.versions())
def test_threads_change_no_bit(isa: str) -> None:
    cases = [DeltaCase(MIXED, 3, 6, 32, 32)]
    cases += [copy.deepcopy(cases[0]) for _ in range(2)]
    outs = [run(case, threads=threads, isa=isa) for case, threads in zip(cases, (1, 2, 3), strict=True)]
    for other in (1, 2):
        assert torch.equal(outs[0], outs[other])
        assert torch.equal(cases[0].state[cases[0].slots], cases[other].state[cases[0].slots])


def captures_of(case: DeltaCase, places: list[list[int]]) -> list[Capture]:
    free = iter(case.free)
    return [Capture(row, tokens, next(free)) for row, own in enumerate(places) for tokens in own]


def pieces(case: DeltaCase, row: int, ends: list[int]) -> list[DeltaCase]:
    """A sequence's part cut into calls of their own, over the same windows and states."""
    first = sum(length for length, _ in case.parts[:row])
    found, start = [], 0
    for end in ends:
        piece = copy.copy(case)
        piece.parts = [(end - start, case.parts[row][1] + start)]
        piece.projected = case.projected[first + start : first + end].clone()
        piece.slots = case.slots[row : row + 1].clone()
        found.append(piece)
        start = end
    return found


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_captures_equal_calls_that_end_there(isa: str, shape: tuple[int, ...]) -> None:
    """Every place of short sequences and random ones of long ones: the same bits in slots, results and what follows."""
    choice, lengths = random.Random(shape[0]), [length for length, _ in MIXED]
    places = [sorted(choice.sample(range(1, length + 1), min(length, 4))) for length in lengths]
    places[3], places[7] = [1, 2, 63, 64], [64, 65, 65, 128, 129]
    case = DeltaCase(MIXED, *shape, extra=shape[3] % 5, spare=sum(map(len, places)) + 1)
    cut = copy.deepcopy(case)
    captures = captures_of(case, places)
    found, row = run(case, isa=isa, captures=captures), 0
    for number, length in enumerate(lengths):
        own = [capture for capture in captures if capture.row == number]
        ends = sorted({capture.tokens for capture in own} | {length})
        for piece, end in zip(pieces(cut, number, ends), ends, strict=True):
            out, slot = run(piece, isa=isa), int(piece.slots[0])
            assert torch.equal(found[row : row + len(out)], out)
            row += len(out)
            for capture in own:
                if capture.tokens == end:
                    assert torch.equal(case.window[capture.slot], cut.window[slot])
                    assert torch.equal(case.state[capture.slot], cut.state[slot])
        assert torch.equal(case.window[case.slots[number]], cut.window[case.slots[number]])
        assert torch.equal(case.state[case.slots[number]], cut.state[case.slots[number]])
    assert case.state[case.free[-1]].isnan().all()


def test_captures_against_the_recurrence() -> None:
    """Each captured state against the formulas in float64 over the tokens up to it."""
    case = DeltaCase([(130, 0), (70, 3)], 2, 4, 32, 32, spare=7)
    captures = captures_of(case, [[3, 64, 100, 130], [1, 69]])
    rows = (slice(0, 130), slice(130, 200))
    expected = []
    for capture in captures:
        reached = copy.copy(case)
        reached.parts = [(capture.tokens, case.parts[capture.row][1])]
        reached.projected = case.projected[rows[capture.row]][: capture.tokens]
        reached.slots = case.slots[capture.row : capture.row + 1]
        _, window, state = reached.expected()
        expected.append((window[reached.slots[0]], state[reached.slots[0]]))
    run(case, captures=captures)
    for capture, (window, state) in zip(captures, expected, strict=True):
        assert torch.equal(case.window[capture.slot].double(), window)
        torch.testing.assert_close(case.state[capture.slot].double(), state, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("length", [1, 40])
def test_nan_stays_in_its_sequence_and_value_head(length: int) -> None:
    """A NaN in one value channel spoils that value head of that sequence, from its token on; nothing else."""
    case = DeltaCase([(length, 4), (length, 0)], 1, 2, 16, 16)
    clean = run(copy.deepcopy(case))
    case.projected[length - 1, 2 * 16] = NAN  # first value channel, first value head, last token of the first sequence
    found = run(case)
    assert found[length - 1, :16].isnan().all()
    assert torch.equal(found[length - 1, 16:], clean[length - 1, 16:])
    assert torch.equal(found[length:], clean[length:])


def test_bad_arguments_are_named() -> None:
    case = DeltaCase([(2, 0), (1, 3)], 1, 2, 16, 16)
    layer = mixers.DeltaNet(case.taps, case.decay_scale, case.decay_bias, case.norm, 1e-6)
    good = {
        "projected": case.projected, "query_lengths": [2, 1], "context_lengths": [0, 3], "state_slots": case.slots,
        "window": case.window, "state": case.state, "dtype": torch.float32,
    }  # fmt: skip
    mixers.delta_net(layer, **good)
    for changed, sentence in [
        ({"query_lengths": [2, 2]}, "query_lengths"),
        ({"state_slots": torch.tensor([1, 1])}, "share a state slot"),
        ({"state_slots": torch.tensor([0, 9])}, "state_slots"),
        ({"state_slots": torch.tensor([-1, 0])}, "state_slots"),
        ({"projected": case.projected[:, :-1].contiguous()}, "projected"),
        ({"window": case.window[:, :-1].contiguous()}, "window"),
        ({"captures": [(2, 1, case.free[0])]}, "row is outside"),
        ({"captures": [(0, 0, case.free[0])]}, "outside its sequence's query tokens"),
        ({"captures": [(0, 3, case.free[0])]}, "outside its sequence's query tokens"),
        ({"captures": [(0, 1, 4)]}, "slot is outside"),
        ({"captures": [(0, 1, int(case.slots[1]))]}, "in use"),
        ({"captures": [(0, 1, case.free[0]), (1, 1, case.free[0])]}, "in use"),
        ({"captures": [(0, 2, case.free[0]), (0, 1, case.free[1])]}, "not in the order"),
        ({"captures": [(1, 1, case.free[0]), (0, 1, case.free[1])]}, "not in the order"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            mixers.delta_net(layer, **{**good, **changed})
    with pytest.raises(TypeError):
        mixers.delta_net(layer, **{**good, "state": case.state.double()})
