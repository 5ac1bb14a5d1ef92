"""The decoder on the device (under Triton's interpreter without one) against transformers and the torch decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine import switches
from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache
from ftengine.core import Request, SamplingParams
from ftengine.errors import ConfigError
from ftengine.formats.format import MXFP4, NVFP4, Format
from ftengine.models.base import Model, ModelOptions, load
from ftengine.models.decoder import Decoder
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.strategy import Strategy
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from ftengine.weights.checkpoint import Checkpoint
from ftengine.wire import Output
from tests.gpu import models
from tests.gpu.models import PLAIN, load_gpu, logits_of, prompt_of, setup, start
from tests.models import driver, tiny
from tests.models.test_native_decoder import Requantized

TOLERANCE = 1e-3
Find = Callable[[str], Path]
Prepared = Callable[..., GpuDecoder]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = models.write(kind, tmp_path_factory.mktemp("checkpoint") / kind)
        return made[kind]

    return find


@pytest.fixture
def prepared(device: str) -> Iterator[Prepared]:
    """Loads a checkpoint to the device and prepares it for a strategy; ended with the test."""
    made: list[GpuDecoder] = []

    def prepare(folder: Path, strategy: Strategy = "resident", slots: int = 0, **options: object) -> GpuDecoder:
        made.append(load_gpu(folder, device, **options))  # type: ignore[arg-type]
        made[-1].prepare(setup(strategy, slots=slots, staging=4, max_running=2))
        return made[-1]

    yield prepare
    for model in made:
        model.close()


@pytest.mark.parametrize("kind", PLAIN)
def test_logits_equal_transformers(checkpoint_of: Find, prepared: Prepared, kind: str) -> None:
    """A prompt in two chunks beside a short one, which decodes meanwhile; then both decode together. Every position."""
    folder, prompts = checkpoint_of(kind), [prompt_of(14, 1), prompt_of(4, 2)]
    found = logits_of(start(prepared(folder)), prompts, 11, 2)
    reference = driver.load_reference(folder)
    for prompt, ours in zip(prompts, found, strict=True):
        theirs = driver.reference_logits(reference, prompt)
        assert theirs.std() > 0.2
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("form", "strategy", "slots", "share"),
    [
        (NVFP4, "resident", 0, None),
        pytest.param(NVFP4, "offload", 0, None, marks=pytest.mark.slow),
        (NVFP4, "offload", 3, None),
        (NVFP4, "cpu", 0, None),
        (NVFP4, "hybrid", 0, 0.5),
        (NVFP4, "hybrid", 4, None),
        pytest.param(NVFP4, "hybrid", 0, None, marks=pytest.mark.slow),
        pytest.param(NVFP4, "hybrid", 12, None, marks=pytest.mark.slow),
        (MXFP4, "hybrid", 4, 0.5),
        pytest.param(MXFP4, "resident", 0, None, marks=pytest.mark.slow),
        pytest.param(MXFP4, "offload", 3, None, marks=pytest.mark.slow),
        pytest.param(MXFP4, "cpu", 0, None, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_strategies_agree_in_four_bits(
    checkpoint_of: Find, prepared: Prepared, form: Format, strategy: Strategy, slots: int, share: float | None
) -> None:
    """None, some and all of the 12 experts in slots, against the torch decoder on the same weights.

    share: of the missing experts for the CPU; None: the strategy's own, 0 % of offload and 100 % of cpu.
    """
    folder, prompts = checkpoint_of("qwen3.5"), [prompt_of(5, 1), prompt_of(4, 2)]
    model = prepared(folder, strategy, slots, source=Requantized(folder, form, widened=False))
    if share is not None:
        model.experts.pool.set_cpu_share(share)
    found = logits_of(start(model), prompts, 4, 1)
    exact = load(Checkpoint.open(folder), ModelOptions("float32", source=Requantized(folder, form, widened=True)))
    assert isinstance(exact, Decoder)
    expected = logits_of(driver.Driver(exact), prompts, 4, 1)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    counts = model.experts.stats()
    assert counts is not None
    if strategy != "resident":
        assert counts.total.hits + counts.total.misses > 0
        assert counts.total.misses == counts.total.fetched + counts.total.cpu_experts
        assert share is None or counts.total.fetched > 0
        if slots < 12:
            assert (counts.total.cpu_experts > 0) == (strategy != "offload")
        else:  # whatever was missing at first, from then on it is there
            assert counts.total.hits > 0


@pytest.mark.parametrize("policy", switches.POLICIES)
def test_victims_are_those_of_the_policy(checkpoint_of: Find, device: str, policy: str) -> None:
    """In a running model with four slots: which experts they hold follows the policy, what comes out does not."""
    folder, prompt = checkpoint_of("qwen3.5"), prompt_of(9, 3)
    model = load_gpu(folder, device)
    model.prepare(setup("offload", slots=4, staging=16, max_running=2, policy=policy, prefetch=0))
    try:
        (found,) = logits_of(start(model), [prompt], 3, 6)
        expected = driver.reference_logits(driver.load_reference(folder), prompt)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert model.experts.pool is not None
        tensors = model.experts.pool.tensors
        ages = tensors.score[tensors.score > -torch.inf]
        # when experts were last used, in steps and layers, or log2 of probabilities on a scale of half-lives
        assert bool((ages * model.experts.pool.layers % 1 == 0).all()) == (policy == "lru")
        assert model.experts.stats().total.kept > 0
    finally:
        model.close()


def test_a_slot_used_before_starts_from_zero(checkpoint_of: Find, prepared: Prepared) -> None:
    """One token after a sequence has left its state, as a decode step and as a prefill."""
    folder, state = checkpoint_of("qwen3.5"), start(prepared(checkpoint_of("qwen3.5")))
    expected = driver.reference_logits(driver.load_reference(folder), prompt_of(2, 4))
    for length in (1, 2):
        state.step([(state.add(prompt_of(2, 3)), 2)])
        state.free_slots.append(state.free_slots.pop() + 1)  # the slot that was just used
        again = state.add(prompt_of(2, 4))
        torch.testing.assert_close(state.step([(again, length)]).cpu(), expected[:length], atol=TOLERANCE, rtol=0)


def test_engine_gives_the_tokens_of_the_cpus_engine(checkpoint_of: Find, prepared: Prepared) -> None:
    """Greedy, three requests of which two run, through scheduler, prefix cache, graphs and sampling."""
    folder = checkpoint_of("qwen3.5")
    prompts = [prompt_of(10, 1), prompt_of(5, 2), prompt_of(10, 1)]
    model = prepared(folder, "hybrid", 4)
    where = "interpret" if model.device.type == "cpu" else "cuda"
    expected = _greedy(driver.load_model(folder), "cpu", prompts)
    assert _greedy(model, where, prompts) == expected


def _greedy(model: Model, where: str, prompts: list[list[int]]) -> list[list[int]]:
    pages, slots = 24, 6
    tensors = allocate_cache(model.cache_layout, pages, models.PAGE_SIZE, slots, where)
    if isinstance(model, GpuDecoder):
        model.warm_up(tensors, lambda stage, done: None)
    limits = Limits(64, 2, model.vocab_size, ())
    cache = SequenceCache(tensors, pages, slots)
    engine = Engine(model, cache, limits, PrefillBudget(16, models.PAGE_SIZE, seconds=60))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        assert not engine.submit(Request(name, prompt, SamplingParams(2, temperature=0.0, ignore_eos=True)))
    while engine.has_work:
        for event in [*engine.admit(), *engine.step()]:
            assert isinstance(event, Output), event
            tokens[event.id] += event.tokens
    engine.scheduler.check_integrity()
    return list(tokens.values())


def test_heads_that_no_kernel_takes_are_refused(tmp_path: Path, device: str) -> None:
    folder = tiny.write("qwen3", tmp_path / "model")
    with pytest.raises(ConfigError, match="heads of 24") as refused:
        load_gpu(folder, device)
    assert refused.value.next_step == "ft serve --device cpu"


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAIN)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(checkpoint_of: Find, prepared: Prepared, kind: str) -> None:
    """Median error of bfloat16 logits against transformers' float32 ones, ours and transformers' own.

    The median, because a token whose router was near a tie goes another way altogether in either.
    """
    folder, prompt = checkpoint_of(kind), prompt_of(60, 7)
    exact = driver.reference_logits(driver.load_reference(folder), prompt)
    theirs = driver.reference_logits(driver.load_reference(folder, torch.bfloat16), prompt)
    (ours,) = logits_of(start(prepared(folder, dtype="bfloat16")), [prompt], 25, 5)
    assert (ours - exact).abs().median() < 1.5 * (theirs - exact).abs().median()


def test_samples_are_two_layers_of_each_kind(checkpoint_of: Find, prepared: Prepared) -> None:
    """What kernels are compiled from: numbers and contents of layers do not tell them apart, shapes do."""
    model = prepared(checkpoint_of("mixtral"))
    first = model.weights.layers[0]
    second = dataclasses.replace(model.weights.layers[1], feed_forward=first.feed_forward)  # alike
    other = dataclasses.replace(second, feed_forward=dataclasses.replace(second.feed_forward, top_k=1))
    layers = (first, second, first, other, second, other, first, other)
    samples = dataclasses.replace(model.weights, layers=layers).samples().layers
    assert [id(layer) for layer in samples] == [id(layer) for layer in (first, second, other, other)]
