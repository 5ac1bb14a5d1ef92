"""Paged attention against a float64 formula, one query at a time (mixer_cases.py)."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels import mixers
from tests.kernels.mixer_cases import NAN, AttentionCase, Packed

MIXED = [(1, 0), (5, 0), (1, 300), (70, 33), (1, 64), (2, 1), (130, 0)]


def run(case: AttentionCase, dtype: torch.dtype = torch.float32, threads: int = 2, isa: str = "") -> torch.Tensor:
    layer = mixers.Attention(case.heads, case.norm, case.epsilon, case.window, case.gated)
    return mixers.attention(
        layer, case.projected.clone(), case.packed.lengths, case.packed.contexts, case.packed.page_table,
        case.packed.slot_mapping, case.tables, case.keys, case.values, dtype, threads, isa,
    )  # fmt: skip


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found[:, : expected.shape[1]].double() - expected).abs().max())


# Heads, key/value heads, dimensions, turned dimensions, page size.
SHAPES = [(4, 2, 64, 16, 16), (3, 1, 20, 20, 7), (5, 5, 33, 8, 1), (16, 2, 256, 64, 32), (2, 2, 16, 0, 128)]


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_batch(isa: str, shape: tuple[int, ...]) -> None:
    heads, kv_heads, dim, rotary, page_size = shape
    case = AttentionCase(
        Packed(MIXED, page_size), heads, kv_heads, dim, rotary, gated=dim % 2 == 0, normed=dim != 20, extra=dim % 5
    )
    expected = case.expected()
    found = run(case, isa=isa)
    assert error(found, expected) < 2e-5
    assert not found[:, expected.shape[1] :].any()


@pytest.mark.parametrize("isa", mixers.versions())
def test_bfloat16_cache(isa: str) -> None:
    """Scores may be products of bfloat16 queries, as in the layers; the cache's rounding is in the formula too."""
    case = AttentionCase(Packed(MIXED, 16), 8, 2, 64, 32, gated=True, cache=torch.bfloat16)
    expected = case.expected()
    assert error(run(case, torch.float32, isa=isa), expected) < 0.02
    assert error(run(case, torch.bfloat16, isa=isa), expected) < 0.03


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("window", [1, 2, 17, 64, 100, 1000])
def test_sliding_window(isa: str, window: int) -> None:
    case = AttentionCase(Packed([(1, 0), (1, 700), (90, 50), (3, 255), (1, 63)], 16), 4, 2, 32, 32, window=window)
    assert error(run(case, isa=isa), case.expected()) < 2e-5


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16], ids=str)
def test_keys_behind_the_window_are_not_read(cache: torch.dtype) -> None:
    case = AttentionCase(Packed([(1, 400), (20, 300)], 16), 4, 2, 32, 32, window=40, cache=cache)
    expected = case.expected()
    for sequence, context in enumerate(case.packed.contexts):
        hidden = case.packed.slots(sequence, range(context - 39))
        case.keys.flatten(0, 1)[hidden] = NAN
        case.values.flatten(0, 1)[hidden] = NAN
    assert error(run(case), expected) < 0.02


def test_more_decode_sequences_than_scratch_holds() -> None:
    case = AttentionCase(Packed([(1, 100 + 61 * i) for i in range(40)], 16), 2, 1, 16, 16)
    assert error(run(case), case.expected()) < 2e-5


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(isa: str, cache: torch.dtype) -> None:
    case = AttentionCase(Packed([*MIXED, (1, 1500)], 16), 8, 2, 64, 32, gated=True, cache=cache)
    one, two, three = (run(case, threads=threads, isa=isa) for threads in (1, 2, 3))
    assert torch.equal(one, two)
    assert torch.equal(one, three)


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_store_what_one_pass_stores(cache: torch.dtype) -> None:
    """150 tokens in one call, and in chunks of 64, 85 and 1: same keys, values and outputs within rounding."""
    whole = AttentionCase(Packed([(150, 0)], 16), 4, 2, 32, 32, cache=cache)
    expected = run(whole)
    keys, values = whole.keys.clone(), whole.values.clone()
    whole.keys.fill_(NAN)
    whole.values.fill_(NAN)
    layer = mixers.Attention(whole.heads, whole.norm, whole.epsilon)
    done = 0
    for length in (64, 85, 1):
        rows = slice(done, done + length)
        out = mixers.attention(
            layer, whole.projected[rows].clone(), [length], [done], whole.packed.page_table,
            whole.packed.slot_mapping[rows], (whole.tables[0][rows], whole.tables[1][rows]), whole.keys, whole.values,
            torch.float32,
        )  # fmt: skip
        assert error(out, expected[rows].double()) < (1e-5 if cache == torch.float32 else 0.02)
        done += length
    used = whole.packed.slots(0, range(150))
    assert torch.equal(whole.keys.flatten(0, 1)[used], keys.flatten(0, 1)[used])
    assert torch.equal(whole.values.flatten(0, 1)[used], values.flatten(0, 1)[used])


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_bad_query_spoils_its_own_head_only(isa: str, bad: float) -> None:
    case = AttentionCase(Packed([(1, 30), (40, 10)], 16), 4, 2, 32, 0, normed=False)
    expected = case.expected()
    case.projected[0, :32] = bad  # token 0, head 0
    case.projected[20, 32 * 3 : 32 * 4] = bad  # token 20, head 3
    found = run(case, isa=isa)
    spoiled = torch.zeros_like(found, dtype=torch.bool)
    spoiled[0, :32] = spoiled[20, 32 * 3 : 32 * 4] = True
    assert found[spoiled].isnan().all()
    assert float((found.double() - expected)[~spoiled].abs().max()) < 2e-5


@pytest.mark.parametrize("isa", mixers.versions())
def test_scores_far_apart(isa: str) -> None:
    """Scores of thousands: the largest takes all, nothing overflows."""
    case = AttentionCase(Packed([(1, 500), (100, 0)], 16), 2, 1, 32, 0, normed=False)
    case.projected *= 100
    expected = case.expected()
    assert error(run(case, isa=isa), expected) < 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("isa", mixers.versions())
def test_minus_infinity_keys_are_ignored_like_softmax_does(isa: str) -> None:
    """A key whose score is -Inf takes no part; with nothing else to see the result is NaN, as torch's softmax says."""
    case = AttentionCase(Packed([(1, 70), (1, 0)], 16), 1, 1, 16, 0, normed=False)
    case.projected[:, :16] = 1.0
    case.keys.flatten(0, 1)[case.packed.slots(0, range(64))] = float("-inf")
    case.projected[1, 16:32] = float("-inf")
    expected = case.expected()
    found = run(case, isa=isa)
    assert error(found[:1], expected[:1]) < 2e-5
    assert found[1, :16].isnan().all()
    assert expected[1].isnan().all()


def test_bad_arguments_are_named() -> None:
    case = AttentionCase(Packed([(3, 5)], 4), 2, 1, 16, 16)
    layer = mixers.Attention(2, case.norm, 1e-6)
    good = {
        "projected": case.projected, "query_lengths": [3], "context_lengths": [5], "page_table": case.packed.page_table,
        "slot_mapping": case.packed.slot_mapping, "tables": case.tables, "keys": case.keys, "values": case.values,
        "dtype": torch.float32,
    }  # fmt: skip
    mixers.attention(layer, **good)
    for changed, sentence in [
        ({"query_lengths": [4]}, "query_lengths"),
        ({"query_lengths": [3, 0], "context_lengths": [5, 0]}, "query_lengths"),
        ({"context_lengths": [5, 1]}, "context_lengths"),
        ({"context_lengths": [-1]}, "context_lengths"),
        ({"context_lengths": [500]}, "page_table"),
        ({"page_table": case.packed.page_table + case.packed.pages}, "page_table"),
        ({"slot_mapping": case.packed.slot_mapping - 1000}, "slots"),
        ({"projected": case.projected[:, :-1].contiguous()}, "projected"),
        ({"values": case.values[:-1]}, "values"),
        ({"tables": (case.tables[0], case.tables[1][:2])}, "sine"),
        ({"isa": "abacus"}, "abacus"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            mixers.attention(layer, **{**good, **changed})
    with pytest.raises(TypeError):
        mixers.attention(layer, **{**good, "keys": case.keys.double(), "values": case.values.double()})
