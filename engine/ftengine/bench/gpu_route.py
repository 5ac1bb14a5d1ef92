"""`python -m ftengine.bench.gpu_route`: what a layer's routing costs besides the bytes it moves.

40 layers of 256 experts, 8 a token, routed anew at random in each step; times are shares of a captured graph of a
step, its end included. The experts themselves are 4 KiB here, so that `fetch` shows what it costs to launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_route", __doc__)

import torch

from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.formats.format import NVFP4, ExpertLayout
from ftengine.kernels.triton.buffers import Mailbox, RouteBuffers
from ftengine.kernels.triton.cache_state import PENDING
from ftengine.kernels.triton.fetch import fetch
from ftengine.kernels.triton.join import join
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.stage import route_prefill
from ftengine.kernels.triton.victims import end_step

LAYERS, EXPERTS, TOP_K, HIDDEN = 40, 256, 8, 2048
ROWS = (1, 2, 4, 8, 16)
REPEATS = 30


def main() -> None:
    parse("gpu_route", __doc__)
    torch.manual_seed(0)
    layout = ExpertLayout(64, 32, NVFP4, NVFP4)
    blocks = torch.zeros(EXPERTS, layout.block_bytes, dtype=torch.uint8).pin_memory()
    banks = {layer: ExpertBank(layout, blocks) for layer in range(LAYERS)}
    whole = LAYERS * EXPERTS
    print(f"{torch.cuda.get_device_name()}\n{'us a layer':<34}" + "".join(f"{f'{rows} rows':>9}" for rows in ROWS))
    resident = SlotPool(banks, 0, 0, TOP_K, "cuda", resident=True)
    show("resident", lambda rows: layers(resident, rows, routing(resident, rows)))
    for name, slots, cpu, policy in (
        ("all in slots, looked up", whole, False, "aged"),
        ("25 % slots, link only", whole // 4, False, "aged"),
        ("25 % slots, link only, lru", whole // 4, False, "lru"),
        ("25 % slots, link and CPU", whole // 4, True, "aged"),
        ("no slots, CPU only", 0, True, "aged"),
    ):
        pool = SlotPool(banks, slots, 256, TOP_K, "cuda", policy=policy)
        show(name, lambda rows, pool=pool, cpu=cpu: layers(pool, rows, routing(pool, rows, cpu)))  # type: ignore[misc]
    pool = SlotPool(banks, whole // 4, 256, TOP_K, "cuda")
    show("fetch of nothing", lambda rows: layers(pool, rows, fetching(pool, banks[0], rows)))
    show("join, CPU not asked", lambda rows: layers(pool, rows, joining(pool, rows)))
    print(f"end of a step, 25 % slots: {timed(lambda: end_step(pool.tensors)):.1f} us")
    logits = torch.randn(8192, EXPERTS, device="cuda")
    planned = timed(lambda: route_prefill(pool.tensors, 0, logits, TOP_K, True))
    print(f"route_prefill of 8192 rows: {planned:.1f} us")


def show(name: str, measure: Callable[[int], float]) -> None:
    print(f"{name:<34}" + "".join(f"{measure(rows):>9.2f}" for rows in ROWS), flush=True)


def layers(pool: SlotPool, rows: int, layer: Callable[[int], None]) -> float:
    """us for one of the layers of a step."""

    def step() -> None:
        for index in range(LAYERS):
            layer(index)
        end_step(pool.tensors)

    return timed(step) / LAYERS


def routing(pool: SlotPool, rows: int, cpu: bool = False) -> Callable[[int], None]:
    buffers = RouteBuffers.allocate(rows, TOP_K, "cuda")
    logits = torch.randn(LAYERS, rows, EXPERTS + 1, device="cuda")
    hidden = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    box = mailbox(rows) if cpu else None

    def layer(index: int) -> None:
        if index == 0:
            logits.normal_()
        route(pool.tensors, index, logits[index], hidden, TOP_K, True, buffers, box)

    return layer


def fetching(pool: SlotPool, bank: ExpertBank, rows: int) -> Callable[[int], None]:
    buffers = RouteBuffers.allocate(rows, TOP_K, "cuda")
    return lambda index: fetch(pool.tensors, index, bank, buffers)


def joining(pool: SlotPool, rows: int) -> Callable[[int], None]:
    box, out = mailbox(rows), torch.zeros(rows, HIDDEN, device="cuda")
    pool.tensors.state[PENDING.value] = 0
    return lambda index: join(pool.tensors, index, box, out)


def mailbox(rows: int) -> Mailbox:
    size = Mailbox.size(rows, TOP_K, HIDDEN, torch.bfloat16)
    buffer = torch.zeros(size, dtype=torch.uint8).pin_memory()
    return Mailbox.carve(buffer, rows, TOP_K, HIDDEN, torch.bfloat16)


def timed(work: Callable[[], object]) -> float:
    """us of a captured graph of `work`, median."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(REPEATS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


if __name__ == "__main__":
    main()
