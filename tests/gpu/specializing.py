"""What a request launches was compiled at the start: every kernel, in every form that Triton tells apart. And what all
layers launch in a decode step, the first ones of each kind do, so that no other launch is needed before graphs.

Launches are noted by what their code depends on, and neither compiled nor made, as for a GPU that need not be there.
fla-core's kernels are not among them. A program and no test, because tests run kernels in the interpreter, which knows
no such forms; test_precompile.py starts it. Ends with status 1 and the list if a request would compile something.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ftengine.cache.tensors import allocate_cache
from ftengine.core import Batch, Capture
from ftengine.kernels.triton import grouped
from ftengine.kernels.triton.precompile import specialization
from ftengine.models.gpu.inputs import spare_chunk
from ftengine.models.gpu.prefill import lengths_of_all_kinds, prefill_step
from tests.gpu import models
from tests.gpu.hopper import Hopper
from tests.models import tiny

PAGE, PAGES, CHUNK, CONTEXT = 16, 80, 1200, 600
LENGTHS = [*range(1, 36), 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 1000, 1023, 1025]
RESULT_BYTES = 1 << 20  # for this hidden size what 64 MiB are for real ones: long prompts are gone through in parts
STAGING = (6, 16)
EXPECTED = {"gate_up_tiles", "down_tiles", "gemv_kernel", "skinny_kernel", "_plan"}
LAYERS = {"num_hidden_layers": 10, "layer_types": ["linear_attention", "full_attention"] * 5}
KINDS = {
    "qwen3.5": {"num_experts": 16, "num_experts_per_tok": 8, "hidden_size": 256, **LAYERS},
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 2, "hidden_size": 256},
}


def note_launches() -> set[tuple[str, Hashable]]:
    """From now on; by name and form."""
    seen: set[tuple[str, Hashable]] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.add((self.fn.__qualname__, specialization(self, args, kwargs)))

    setattr(driver, "_active", Hopper())  # noqa: B010
    setattr(JITFunction, "run", run)  # noqa: B010
    return seen


def batch_of(lengths: list[int], before: list[int], draw: random.Random) -> Batch:
    """Sequences that lie anywhere, some of which end and some of which keep a state on the way."""
    total = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0) - 1
    captures = [Capture(row, draw.randrange(1, length + 1), 6) for row, length in enumerate(lengths) if length > 40]
    return Batch(
        sequences=[],
        input_ids=torch.zeros(total, dtype=torch.long),
        positions=torch.cat(
            [torch.arange(start, start + length) for start, length in zip(before, lengths, strict=True)]
        ),
        query_lengths=lengths,
        context_lengths=before,
        page_table=torch.zeros(len(lengths), draw.randrange(56, PAGES), dtype=torch.long),
        slot_mapping=torch.zeros(total, dtype=torch.long),
        state_slots=torch.arange(len(lengths)),
        logits_rows=ends[: draw.randrange(1, len(lengths) + 1)],
        captures=captures,
    )


def missed(kind: str, staging: int, folder: Path, launched: set[tuple[str, Hashable]]) -> list[tuple[str, Hashable]]:
    """What requests launch beyond what the start of a model of this kind has."""
    tiny.write(kind, folder, **{**models.COMMON, **models.SMALL[kind], **KINDS[kind]})
    model = models.load_gpu(folder, "cpu", dtype="bfloat16")
    model.prepare(models.setup("hybrid", slots=4, staging=staging, context=CHUNK, page_size=PAGE))
    cache, draw = allocate_cache(model.cache_layout, PAGES, PAGE, 8, "interpret"), random.Random(3)
    samples = model.weights.samples()
    assert model.steps is not None
    try:
        with torch.no_grad():
            model.steps.rehearse(samples, cache)
            for length in lengths_of_all_kinds(model.weights, PAGE, CHUNK):
                prefill_step(samples, cache, spare_chunk(cache, length), model.experts)
            ready = set(launched)
            assert model.steps._launches_all(samples, cache), "layers beyond the first ones of each kind launch more"
            lacking = replace(samples, layers=samples.layers[:1])
            assert not model.steps._launches_all(lacking, cache), "one layer launches all that different ones do"
            for length in LENGTHS:
                prefill_step(samples, cache, spare_chunk(cache, length), model.experts)
            for _ in range(20):
                lengths = [draw.choice([1, draw.randrange(1, 200)]) for _ in range(draw.randrange(2, 6))]
                before = [draw.choice([0, draw.randrange(CONTEXT)]) for _ in lengths]
                prefill_step(samples, cache, batch_of(lengths, before, draw), model.experts)
    finally:
        model.close()
    return sorted(launched - ready, key=str)


def main() -> int:
    grouped.RESULT_BYTES = RESULT_BYTES
    launched, found = note_launches(), []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            for staging in STAGING:
                found += missed(kind, staging, Path(folder, f"{kind}-{staging}"), launched)
    for name, form in found:
        print(name, form)
    print(f"{len(launched)} forms of kernels at the start, {len(found)} more with requests")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
