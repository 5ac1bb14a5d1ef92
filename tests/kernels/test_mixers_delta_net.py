"""Gated DeltaNet against the float64 recurrence, token by token (mixer_cases.py)."""

from __future__ import annotations

import copy

import pytest
import torch

from ftengine.kernels import mixers
from tests.kernels.mixer_cases import NAN, DeltaCase

MIXED = [(1, 0), (3, 0), (1, 9), (64, 5), (70, 0), (1, 2), (2, 1), (129, 7)]


def run(case: DeltaCase, dtype: torch.dtype = torch.float32, threads: int = 2, isa: str = "") -> torch.Tensor:
    """Changes the case's window and state."""
    layer = mixers.DeltaNet(case.taps, case.decay_scale, case.decay_bias, case.norm, case.epsilon)
    lengths, contexts = ([part[i] for part in case.parts] for i in (0, 1))
    return mixers.delta_net(
        layer, case.projected, lengths, contexts, case.slots, case.window, case.state, dtype, threads, isa
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
    ]:
        with pytest.raises(ValueError, match=sentence):
            mixers.delta_net(layer, **{**good, **changed})
    with pytest.raises(TypeError):
        mixers.delta_net(layer, **{**good, "state": case.state.double()})
