"""`python -m ftengine.bench.prompts`: what a long prompt costs before a token of it is computed.

Finding 60,000 tokens in the prefix tree and admitting the request, with the pages and a state of Qwen3.6-35B-A3B; and
with `--model` rendering and tokenizing a grown conversation of about as many, with that model's template and tokenizer.
Copies to and from host memory and disk: `python -m ftengine.bench.prompt_tiers`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from ftengine.bench.prompt_tiers import LAYOUT, PAGE
from ftengine.cache.match import match
from ftengine.cache.place import packed
from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache, state_bytes
from ftengine.conversation import Conversation, Message, Text, ToolCall, ToolResult, ToolSpec
from ftengine.core import Boundary, BoundaryKind, Request, SamplingParams, Sequence
from ftengine.dialect import open_dialect
from ftengine.weights.checkpoint import Checkpoint

TOKENS = 60_000
SLOTS = 24  # 1.5 GB
BRANCHES = 8  # other sessions in the tree, alike for the first quarter
STEP = 2048  # tokens of a step of prefill
REPEATS = 21


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--model", type=Path, help="a model folder: its template and tokenizer are measured, too")
    options = parser.parse_args()
    lookup(options.tokens)
    if options.model is not None:
        render(options.model, options.tokens)
    return 0


def lookup(length: int) -> None:
    choose = random.Random(0)
    pages = (BRANCHES + 3) * length // PAGE
    cache = SequenceCache(allocate_cache(LAYOUT, pages, PAGE, SLOTS), pages, SLOTS)
    tokens = [choose.randrange(1 << 17) for _ in range(length)]
    for branch in range(BRANCHES):
        other = tokens[: length // 4] + [choose.randrange(1 << 17) for _ in range(length // 8)]
        run(cache, f"other {branch}", other)
    run(cache, "itself", tokens)
    prompt = tokens + [choose.randrange(1 << 17) for _ in range(200)]
    key = packed(prompt)
    print(f"a prompt of {len(prompt)} tokens, {cache.tree.size:,} pages in the tree, median and most of {REPEATS}:")
    report("packed", [timed(lambda: packed(prompt)) for _ in range(REPEATS)])
    report("looked up", [timed(lambda: match(cache.store, key, len(prompt) - 1)) for _ in range(REPEATS)])
    admitted = []
    for number in range(REPEATS):
        sequence = asked(f"itself:{number}", prompt)
        admitted.append(timed(lambda each=sequence: cache.admit(each)))
        assert sequence.computed >= length - PAGE, "the prompt was not found"
        cache.release(sequence)
    report("admitted", admitted)
    print(f"    with a copy of {state_bytes(LAYOUT) / 1e6:.0f} MB of states")


def run(cache: SequenceCache, name: str, tokens: list[int]) -> None:
    """As if the model had computed it, in steps."""
    sequence = asked(name, tokens)
    if not cache.admit(sequence):
        raise MemoryError("there are too few pages")
    while sequence.computed < len(tokens):
        end, _ = cache.plan(sequence, min(sequence.computed + STEP, len(tokens)))
        sequence.computed = end
        cache.commit(sequence)
    cache.release(sequence)


def asked(name: str, tokens: list[int]) -> Sequence:
    boundaries = [Boundary(len(tokens), BoundaryKind.PROMPT_END)]
    return Sequence(
        Request(name, tokens, SamplingParams(max_tokens=1), boundaries, session=name.partition(":")[0]), list(tokens)
    )


def render(folder: Path, length: int) -> None:
    dialect = open_dialect(Checkpoint.open(folder))
    messages, step = [Message("user", (Text("Make the tests pass."),))], 0
    first: list[float] = []
    while True:
        conversation = Conversation(tuple(messages), TOOLS)
        began = time.perf_counter()
        count = len(dialect.render(conversation).tokens)
        first.append(time.perf_counter() - began)
        if count >= length:
            break
        messages += turn(step)
        step += 1
    report(f"rendered after each of {step} calls, {count} tokens in the end", first[-REPEATS:])
    again = [timed(lambda: dialect.render(conversation)) for _ in range(REPEATS)]
    report("rendered again, nothing new", again)
    fresh = open_dialect(Checkpoint.open(folder))
    report("rendered for the first time", [timed(lambda: fresh.render(conversation))])


TOOLS = tuple(
    ToolSpec(
        f"tool_{number}",
        "Reads a part of a file and says what is in it. " * 20,
        {"type": "object", "properties": {"path": {"type": "string"}, "from": {"type": "integer"}}},
    )
    for number in range(12)
)


def turn(number: int) -> list[Message]:
    """A call, and about 500 tokens of what came of it."""
    choose = random.Random(number)
    lines = (f"{choose.randrange(10_000)}: value_{choose.randrange(1000)} = read(part)" for _ in range(28))
    call = ToolCall(f"call_{number}", f"tool_{number % len(TOOLS)}", {"path": f"src/part_{number}.py", "from": number})
    result = ToolResult(call.id, (Text("\n".join(lines)),))
    return [Message("assistant", (Text(f"Now part {number}."), call)), Message("tool", (result,))]


def timed(work: object) -> float:
    """Seconds."""
    assert callable(work)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(what: str, seconds: list[float]) -> None:
    print(f"  {what}: {1e3 * statistics.median(seconds):.2f} ms, {1e3 * max(seconds):.2f} at the most")


if __name__ == "__main__":
    sys.exit(main())
