"""A process that serves a model on the GPU with little memory, and says what it used of it: see test_budget.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch

from ftengine.config import Resolved
from ftengine.core import Request, SamplingParams
from ftengine.memory.gpu import Gpu, probe
from ftengine.memory.vram import DevicePlan
from ftengine.scheduler import start_gpu
from ftengine.scheduler.engine import Engine
from ftengine.wire import Failed
from tests.gpu.test_start_parts import beginning

FREE = 2 << 30  # bytes that the engine takes for all that is free
PROMPT, TOKENS, RUNNING = 3000, 24, 4
SETTINGS = {
    "moe_backend": "hybrid", "context": 4096, "kv_tokens": 1 << 19, "prefill_chunk": 1024, "cache_host": 0,
    "max_running_requests": RUNNING, "cache_disk": 0, "moe_cpu_threads": 2,
}  # fmt: skip


def work(engine: Engine) -> int:
    """Several long prompts, in chunks, beside those that decode already. Returns the least bytes free after a step."""
    free = torch.cuda.mem_get_info()[0]
    draw = torch.Generator().manual_seed(0)
    for number in range(RUNNING):
        prompt = torch.randint(engine.model.vocab_size, (PROMPT,), generator=draw).tolist()
        params = SamplingParams(TOKENS * (number + 1), temperature=0.0, ignore_eos=True)
        assert not engine.submit(Request(str(number), prompt, params))
    while engine.has_work:
        for event in [*engine.admit(), *engine.step()]:
            assert not isinstance(event, Failed), event
        free = min(free, torch.cuda.mem_get_info()[0])
    return free


def main(folder: Path) -> None:
    """Prints one JSON object, of bytes unless it is named otherwise."""
    gpu = probe()
    assert isinstance(gpu, Gpu), gpu
    torch.ones(1, device="cuda").item()  # a CUDA context is not of the budget: what is free is asked beside one
    before = torch.cuda.mem_get_info()[0]
    plans: list[DevicePlan] = []
    report = start_gpu.report

    def reported(plan: DevicePlan, *arguments: object) -> None:
        plans.append(plan)
        report(plan, *arguments)  # type: ignore[arg-type]

    start_gpu.report = reported
    gpu = msgspec.structs.replace(gpu, free=FREE)
    _, started = start_gpu.start_on_gpu(beginning(folder, device="cuda", **SETTINGS), gpu, Resolved("cuda", "asked"))
    assert started is not None
    free = work(started.engine)
    torch.cuda.synchronize()
    counts = started.engine.model.experts.stats().total  # type: ignore[attr-defined]
    print(json.dumps({
        "budget": plans[0].budget.value,
        "planned": plans[0].used,
        "slots": plans[0].slots.value,
        "used": torch.cuda.max_memory_allocated(),
        "held": torch.cuda.max_memory_reserved(),
        "gone": before - free,
        "fetched": counts.fetched,
        "cpu_experts": counts.cpu_experts,
    }))  # fmt: skip
    started.engine.model.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
