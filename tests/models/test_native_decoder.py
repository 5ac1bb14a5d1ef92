"""The native whole-step decoder against the Python layers, over all formats and shapes of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import F32, FORMATS, ExpertLayout, Format
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.quantize import quantize
from ftengine.kernels import native
from ftengine.models.base import ModelOptions, load
from ftengine.models.decoder import Decoder
from ftengine.models.native_decoder import NativeDecoder
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source
from ftengine.weights.source import TensorFacts
from ftengine.weights.stack import natural
from tests.models import driver, tiny

Find = Callable[[str], Path]
ARCHITECTURES = ["mixtral", "qwen3", "qwen3.5"]

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="the native library is not built")


class Requantized:
    """A checkpoint's weights with every matrix quantized; `widened`: and dequantized to float32 again.

    mixed: matrices take turns with `format` and F32, so that stacked projections consist of several.
    """

    def __init__(self, folder: Path, format: Format, *, widened: bool, mixed: bool = False) -> None:
        self.inner = open_source(folder)
        self.format, self.widened, self.mixed = format, widened, mixed

    def format_of(self, name: str) -> Format:
        keep = self.mixed and ("k_proj" in name or "in_proj_z" in name or "up_proj" in name)
        return F32 if keep else self.format

    def tensors(self) -> dict[str, TensorFacts]:
        return {
            name: dataclasses.replace(facts, format=F32 if self.widened else self.format_of(name))
            for name, facts in self.inner.tensors().items()
        }

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.inner.plain(name, dtype)

    def matrix(self, name: str) -> QuantMatrix | PackedMatrix:
        found = quantize(dequantize(natural(self.inner.matrix(name))), self.format_of(name))
        return QuantMatrix(F32, found.rows, found.columns, dequantize(found)) if self.widened else found

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        return None

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        raise AssertionError("its experts are tensors")

    def __enter__(self) -> Requantized:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.inner.__exit__(kind, error, at)


def model_of(folder: Path, source: Requantized, dtype: str = "float32", threads: int = 1) -> Decoder:
    model = load(Checkpoint.open(folder), ModelOptions(dtype=dtype, source=source, threads=threads))
    assert isinstance(model, Decoder)
    assert model.native is not None
    return model


def prompt_of(length: int, seed: int = 5) -> list[int]:
    return torch.randint(tiny.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_equals_its_numbers_in_float32(checkpoint_of: Find, kind: str, name: str) -> None:
    """Quantized weights through the native decoder; the same ones dequantized, through the Python layers."""
    folder, form, prompt = checkpoint_of(kind), FORMATS[name], prompt_of(50)
    found = driver.prefill_logits(model_of(folder, Requantized(folder, form, widened=False)), prompt, 17)
    reference = dataclasses.replace(model_of(folder, Requantized(folder, form, widened=True)), native=None)
    expected = driver.prefill_logits(reference, prompt)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_projections_of_several_formats(checkpoint_of: Find, kind: str) -> None:
    """k_proj and in_proj_z in float32 beside NVFP4; gate and up of one expert in two formats become BF16."""
    folder, prompt = checkpoint_of(kind), prompt_of(40)
    model = model_of(folder, Requantized(folder, FORMATS["nvfp4"], widened=False, mixed=True))
    plain = dataclasses.replace(model, native=None)
    torch.testing.assert_close(
        driver.prefill_logits(model, prompt, 13), driver.prefill_logits(plain, prompt), atol=1e-3, rtol=0
    )
    exact = model_of(folder, Requantized(folder, FORMATS["nvfp4"], widened=True, mixed=True))
    error = (driver.prefill_logits(model, prompt) - driver.prefill_logits(exact, prompt)).abs().median()
    assert error < 0.05  # of up_proj's rounding to BF16


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("name", ["bf16", "nvfp4", "fp8-block"])
def test_bfloat16_is_near_float32(checkpoint_of: Find, kind: str, name: str) -> None:
    """Median, because a token whose router was near a tie goes another way altogether."""
    folder, form, prompt = checkpoint_of(kind), FORMATS[name], prompt_of(60)
    found = driver.prefill_logits(model_of(folder, Requantized(folder, form, widened=False), "bfloat16"), prompt, 25)
    exact = driver.prefill_logits(model_of(folder, Requantized(folder, form, widened=True)), prompt)
    assert (found - exact).abs().median() < 0.03 * exact.std()


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_mixed_batches_with_chosen_rows(checkpoint_of: Find, kind: str, threads: int) -> None:
    """Chunks of two prompts beside decoding sequences; only some rows' logits, in any order. Against each alone."""
    folder = checkpoint_of(kind)
    model = model_of(folder, Requantized(folder, FORMATS["bf16"], widened=False), threads=threads)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((33, 12, 70, 5))]
    alone = [driver.prefill_logits(model, prompt) for prompt in prompts]
    shared = driver.Driver(model)
    sequences = [shared.add(prompt) for prompt in prompts]
    shared.step([(sequences[0], 32), (sequences[3], 4)])
    for first, second in ((7, 40), (5, 30)):
        work = [(sequences[1], first), (sequences[2], second)]
        if sequences[0].computed < 33:
            work = [(sequences[0], 1), work[0], (sequences[3], 1), work[1]]
        logits = shared.step(work, last_rows_only=True)
        for (sequence, _), row in zip(work, logits, strict=True):
            expected = alone[sequences.index(sequence)][sequence.computed - 1]
            torch.testing.assert_close(row, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_step_that_needs_much_memory_goes_through_in_slices(checkpoint_of: Find, kind: str) -> None:
    """Slices of 64 tokens that cut two prompts anywhere, with a decoding sequence between them; against one slice."""
    folder = checkpoint_of(kind)
    whole = model_of(folder, Requantized(folder, FORMATS["bf16"], widened=False))
    sliced = dataclasses.replace(whole, native=NativeDecoder(whole, threads=2, slice_bytes=1))
    found = []
    for model in (whole, sliced):
        shared = driver.Driver(model)
        first, second, third = (shared.add(prompt_of(length, length)) for length in (150, 10, 90))
        shared.step([(second, 9)])
        found.append(shared.step([(first, 150), (second, 1), (third, 90)]))
        found.append(shared.cache.keys[0].nan_to_num())
    torch.testing.assert_close(found[2], found[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(found[3], found[1], atol=1e-3, rtol=0)


def test_rows_in_any_order_and_none(checkpoint_of: Find) -> None:
    folder = checkpoint_of("qwen3.5")
    model = model_of(folder, Requantized(folder, FORMATS["f32"], widened=False))
    prompt = prompt_of(20)
    expected = driver.prefill_logits(model, prompt)
    for rows in ([], [19], [3, 1, 17], [4, 5, 6], [2, 2]):
        again = driver.Driver(model)
        batch_of = again._batch

        def choosing(work: object, rows: list[int] = rows, batch_of: Callable = batch_of) -> object:
            batch = batch_of(work)
            batch.logits_rows = torch.tensor(rows, dtype=torch.int64)
            return batch

        again._batch = choosing  # type: ignore[method-assign]
        found = again.step([(again.add(prompt), 20)])
        assert found.shape == (len(rows), tiny.VOCABULARY)
        torch.testing.assert_close(found, expected[rows], atol=1e-5, rtol=0)


def test_a_batch_that_does_not_fit_the_cache_is_refused(checkpoint_of: Find) -> None:
    """Before anything is computed, with the reason: pages, slots, rows and token ids outside their ranges."""
    folder = checkpoint_of("qwen3.5")
    model = model_of(folder, Requantized(folder, FORMATS["f32"], widened=False))
    for field, value, reason in (
        ("input_ids", tiny.VOCABULARY, "token id"),
        ("slot_mapping", 1 << 40, "slot is outside"),
        ("page_table", -1, "page is outside"),
        ("state_slots", 8, "state slot"),
        ("logits_rows", 4, "wanted row"),
    ):
        state = driver.Driver(model)
        sequence = state.add(prompt_of(4))
        sequence.pages = [0]
        batch = state._batch([(sequence, 4)])
        getattr(batch, field).view(-1)[0] = value
        with pytest.raises(ValueError, match=reason):
            model.forward(batch, state.cache)
