"""The demo model, pulled and computed by the engine's model code, against transformers in float32.

Near-equal experts would hide wrong routing, so besides the answer the chosen experts and the logits are compared, and
experts in the wrong order must fail that comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ftengine.conversation import Conversation, Message, Text, ToolSpec
from ftengine.dialect import open_dialect
from ftengine.dialect.base import Dialect
from ftengine.models.base import ModelOptions, load
from ftengine.weights.checkpoint import Checkpoint
from tests.models.driver import generate, prefill_logits, router_ids

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TOLERANCE = 1e-3
AGENT = "You are a coding agent running in a terminal."
BASH = ToolSpec("bash", "Run a shell command", {"type": "object", "properties": {"command": {"type": "string"}}})


class Pair(NamedTuple):
    ours: Any
    reference: Any  # transformers' MixtralForCausalLM
    dialect: Dialect


class Computed(NamedTuple):
    """By the reference."""

    tokens: list[int]
    logits: torch.Tensor  # [T, V]
    routes: list[torch.Tensor]  # of every layer, [T, 2], most probable expert first


@pytest.fixture(scope="module")
def pair(demo_model: Path) -> Pair:
    from transformers import MixtralForCausalLM

    checkpoint = Checkpoint.open(demo_model)
    ours = load(checkpoint, ModelOptions(dtype="float32"))
    reference = MixtralForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    return Pair(ours, reference, open_dialect(checkpoint))


def prompt(dialect: Dialect, *tools: ToolSpec, system: str = "") -> list[int]:
    leading = (Message("system", (Text(system),)),) if system else ()
    return dialect.render(Conversation((*leading, Message("user", (Text(QUESTION),))), tools)).tokens


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Computed:
    """Of a prompt with a tool, an agent's system message and the question."""
    tokens = prompt(pair.dialect, BASH, system=AGENT)
    with torch.no_grad():
        out = pair.reference(torch.tensor([tokens]), output_router_logits=True)
    return Computed(tokens, out.logits[0], [logits.topk(2, dim=-1).indices for logits in out.router_logits])


def difference(pair: Pair, expected: Computed) -> float:
    return float((prefill_logits(pair.ours, expected.tokens) - expected.logits).abs().max())


def test_logits_equal_transformers(pair: Pair, expected: Computed) -> None:
    assert difference(pair, expected) < TOLERANCE


def test_routes_equal_transformers(pair: Pair, expected: Computed) -> None:
    """And every expert is chosen somewhere in every layer: one that no token reaches would not be tested here."""
    ours = router_ids(pair.ours, expected.tokens)
    assert len(ours) == 30
    for layer, (chosen, theirs) in enumerate(zip(ours, expected.routes, strict=True)):
        assert torch.equal(chosen, theirs), f"layer {layer} routes differently"
        assert torch.bincount(chosen.flatten(), minlength=4).min() > 0, f"layer {layer} leaves an expert out"


@contextmanager
def experts_in_another_order(model: Any, layers: range) -> Iterator[None]:
    """Each expert takes the place of the one before it; the router does not know."""
    blocks = [model.layers[layer].feed_forward.executor.pool.bank(layer).blocks for layer in layers]
    try:
        for block in blocks:
            block.copy_(block.roll(1, dims=0))
        yield
    finally:
        for block in blocks:
            block.copy_(block.roll(-1, dims=0))


@pytest.mark.parametrize("layers", [range(30), range(15, 16)], ids=["all layers", "one layer"])
def test_permuted_experts_are_noticed(pair: Pair, expected: Computed, layers: range) -> None:
    with experts_in_another_order(pair.ours, layers):
        assert difference(pair, expected) > 100 * TOLERANCE


@pytest.mark.parametrize(("system", "tools"), [("", ()), (AGENT, (BASH,))], ids=["alone", "asked by an agent"])
def test_the_capital_of_france(pair: Pair, system: str, tools: tuple[ToolSpec, ...]) -> None:
    tokens = prompt(pair.dialect, *tools, system=system)
    wanted = len(pair.dialect.encode(ANSWER)) + 1
    (ours,) = generate(pair.ours, [tokens], wanted)
    decoder = pair.dialect.decoder()
    assert decoder.feed(ours[:-1]) + decoder.finish() == ANSWER
    assert ours[-1] in pair.ours.eos_token_ids
    if not tools:
        theirs = pair.reference.generate(torch.tensor([tokens]), max_new_tokens=wanted, do_sample=False)
        assert theirs[0, len(tokens) :].tolist() == ours
