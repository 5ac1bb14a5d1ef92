"""The scripted model against its own promise: it spells the script, and it notices a cache that lost something."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from ftengine.cache.tensors import allocate_cache
from ftengine.core import Batch, CacheTensors, Request, SamplingParams, Sequence
from ftengine.weights.checkpoint import Checkpoint
from tests.support.script import GREETING, TITLE, agent_answer
from tests.support.scripted import ScriptedModel
from tests.support.serving import SCRIPTED_CHECKPOINT

PAGE = 4
TOOLS = '<tools>\n{"type": "function", "function": {"name": "bash"}}\n{"name": "read"}\n{"name": "edit"}\n</tools>'


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel(Checkpoint.open(SCRIPTED_CHECKPOINT))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SCRIPTED_CHECKPOINT / "tokenizer.json"))


def prompt_of(*turns: str) -> str:
    """Turns are "role: text"; the prompt ends where a thinking assistant begins."""
    parts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, _, text in (turn.partition(": ") for turn in turns)]
    return "".join(parts) + "<|im_start|>assistant\n<think>\n"


def step(model: ScriptedModel, cache: CacheTensors, sequence: Sequence, tokens: int) -> torch.Tensor:
    start, end = sequence.computed, sequence.computed + tokens
    positions = torch.arange(start, end)
    table = torch.tensor(sequence.pages)
    logits = model.forward(
        Batch(
            sequences=[sequence],
            input_ids=torch.tensor(sequence.tokens[start:end]),
            positions=positions,
            query_lengths=[tokens],
            context_lengths=[start],
            page_table=table[None],
            slot_mapping=table[positions // PAGE] * PAGE + positions % PAGE,
            state_slots=torch.tensor([-1]),
            logits_rows=torch.tensor([tokens - 1]),
        ),
        cache,
    )
    sequence.computed = end
    return logits


def start(model: ScriptedModel, tokenizer: Tokenizer, prompt: str) -> tuple[CacheTensors, Sequence]:
    tokens = tokenizer.encode(prompt).ids
    pages = (len(tokens) + 200) // PAGE
    cache = allocate_cache(model.cache_layout, pages, PAGE, 0)
    request = Request(id="r", prompt=tokens, sampling=SamplingParams(max_tokens=200))
    return cache, Sequence(request=request, tokens=list(tokens), pages=list(range(pages))[::-1])


def test_answer_is_spelled_token_by_token(model: ScriptedModel, tokenizer: Tokenizer) -> None:
    """Prefill in two chunks, then one token a step until the end of the sequence; against the script's own text."""
    prompt = prompt_of("user: hello")
    cache, sequence = start(model, tokenizer, prompt)
    step(model, cache, sequence, 2)
    logits = step(model, cache, sequence, sequence.prompt_length - 2)
    for _ in range(200):
        sequence.tokens.append(int(logits[0].argmax()))
        if sequence.tokens[-1] in model.eos_token_ids:
            break
        logits = step(model, cache, sequence, 1)
    written = tokenizer.decode(sequence.tokens[sequence.prompt_length : -1], skip_special_tokens=False)
    assert written == agent_answer(prompt)
    assert written.endswith("\n</think>\n\n" + TITLE)


def test_lost_page_is_noticed(model: ScriptedModel, tokenizer: Tokenizer) -> None:
    cache, sequence = start(model, tokenizer, prompt_of("user: hello"))
    step(model, cache, sequence, 2)
    cache.keys[0][sequence.pages[0]] = 0
    with pytest.raises(RuntimeError, match="does not hold"):
        step(model, cache, sequence, sequence.prompt_length - 2)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["user: name this"], TITLE),
        ([f"system: {TOOLS}", "user: hi"], GREETING),
        (
            [f"system: {TOOLS}", "user: make /r/hello.py greet"],
            "I will list the files.\n\n<tool_call>\n<function=bash>",
        ),
        (
            [f"system: {TOOLS}", "user: make /r/hello.py greet", "user: \n<tool_response>\n.\n</tool_response>"],
            "/r/hello.py",
        ),
    ],
)
def test_step_follows_from_the_prompt(turns: list[str], expected: str) -> None:
    answer = agent_answer(prompt_of(*turns)).split("</think>\n\n")[-1]
    assert expected in answer
