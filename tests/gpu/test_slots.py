"""The host's side of the expert cache: what it refuses, settings, counters, and the ring of recorded steps."""

from __future__ import annotations

import pytest
import torch

from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import DEFAULT_COSTS, SlotPool
from ftengine.experts.split import LaneCosts, forced_share
from ftengine.formats.format import BF16, ExpertLayout
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.buffers import RouteBuffers
from ftengine.kernels.triton.fetch import admit, fetch
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.stage import route_prefill, seed, stage
from ftengine.kernels.triton.victims import end_step
from tests.gpu.cache_setup import HIDDEN, LAYOUT, make_banks, make_mailbox

LAYERS, EXPERTS, TOP_K = 2, 8, 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "mru"}, "no policy of the expert cache is called 'mru'; there are aged, lru"),
        ({"slots": -1}, "-1 slots"),
        ({"staging": -2}, "-2 staging slots"),
    ],
)
def test_impossible_pools_are_refused(change: dict, message: str, device: str) -> None:
    arguments = {"slots": 4, "staging": 2} | change
    with pytest.raises(ValueError, match=message):
        SlotPool(make_banks(LAYERS, EXPERTS, device), top_k=TOP_K, device=device, **arguments)


def test_banks_must_be_layers_of_one_kind(device: str) -> None:
    banks = make_banks(LAYERS, EXPERTS, device)
    with pytest.raises(ValueError, match=r"numbered 0, 1, 2"):
        SlotPool({1: banks[0]}, 4, 2, TOP_K, device)
    with pytest.raises(ValueError, match="same number of experts"):
        SlotPool({0: banks[0], 1: make_banks(1, 4, device)[0]}, 4, 2, TOP_K, device)


def test_more_slots_than_experts_are_not_allocated(device: str) -> None:
    banks = make_banks(LAYERS, EXPERTS, device)
    large = ExpertLayout(HIDDEN * 8, 64, BF16, BF16)
    banks[1] = ExpertBank.allocate(large, EXPERTS)
    pool = SlotPool(banks, 1000, 3, TOP_K, device).tensors
    assert pool.slots == LAYERS * EXPERTS
    assert tuple(pool.blocks.shape) == (LAYERS * EXPERTS + 3, large.block_bytes)
    assert large.block_bytes > LAYOUT.block_bytes


def test_settings_reach_the_device(device: str) -> None:
    """The split's table against the rule, LaneCosts.link_share, and against fixed shares."""
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 4, 2, TOP_K, device)
    control, split, costs = pool.tensors.control, pool.tensors.split, LaneCosts(1.0, 2.0, 3.0, 4.0)

    def rows(number: int) -> list[int]:
        return split[0, number - 1, : number * TOP_K + 1].tolist()

    pool.set_costs(costs)
    assert rows(3) == [costs.link_share(misses) for misses in range(3 * TOP_K + 1)]
    pool.set_cpu_share(0.25)
    pool.set_gate(False)
    pool.set_background(0.5)
    pool.set_trials(64)
    assert rows(2) == [forced_share(misses, 0.25) for misses in range(2 * TOP_K + 1)]
    assert control[: at.TRIES.value + 1].tolist() == [0, 0.5, 0, 64]
    pool.set_costs(DEFAULT_COSTS)
    assert rows(2) == [forced_share(misses, 0.25) for misses in range(2 * TOP_K + 1)]
    pool.set_cpu_share(None)
    assert rows(16) == [DEFAULT_COSTS.link_share(misses) for misses in range(16 * TOP_K + 1)]
    with pytest.raises(ValueError, match=r"0 to 1, not 1\.5"):
        pool.set_cpu_share(1.5)
    with pytest.raises(ValueError, match="0 to 4 experts"):
        pool.set_background(9)


def test_counters_add_up_and_become_bytes(device: str) -> None:
    """By hand: the same two experts in three steps, half of the missing on the CPU; then a prompt."""
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 4, 8, TOP_K, device)
    pool.set_cpu_share(0.5)
    pool.set_background(0)
    buffers, mailbox = RouteBuffers.allocate(1, TOP_K, device), make_mailbox(1, TOP_K, device)
    logits = torch.zeros(1, EXPERTS, device=device)
    logits[0, [3, 5]] = torch.tensor([2.0, 1.0], device=device)
    for _ in range(3):
        route(pool.tensors, 1, logits, torch.zeros(1, HIDDEN, device=device), TOP_K, True, buffers, mailbox)
        fetch(pool.tensors, 1, banks[1], buffers)
        admit(pool.tensors, 1, banks[1])
        end_step(pool.tensors)
    # Step 1: of two missing, one is fetched and one computed. Steps 2, 3: one hit; of one missing, half is rounded up.
    layer = pool.stats().layers[1]
    assert (layer.steps, layer.hits, layer.misses, layer.fetched, layer.kept) == (3, 2, 4, 1, 1)
    assert (layer.cpu_experts, layer.cpu_routes, layer.admitted) == (3, 3, 0)
    assert (layer.link_bytes, layer.cpu_bytes) == (LAYOUT.block_bytes, 3 * LAYOUT.block_bytes)
    assert layer.hit_rate == 2 / 6
    prompt = torch.zeros(2, EXPERTS, device=device)
    prompt[:, 3], prompt[:, 7] = 5, 4
    routes = route_prefill(pool.tensors, 1, prompt, TOP_K, True)
    stage(pool.tensors, banks[1], routes, 0)
    seed(pool.tensors, 1, routes, 0)
    stats = pool.stats()
    assert (stats.layers[1].staged, stats.layers[1].seeded) == (1, 1)
    assert stats.layers[1].link_bytes == 2 * LAYOUT.block_bytes
    assert stats.layers[0].hit_rate == 1
    assert stats.total == stats.layers[0] + stats.layers[1]
    assert stats.total.misses == 4


@pytest.mark.parametrize("resident", [False, True])
def test_the_ring_holds_the_last_steps(resident: bool, device: str) -> None:
    """Against what the router said, of the first of two rows; nothing before the start or after the end."""
    torch.manual_seed(0)
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 4, 8, TOP_K, device, trace_steps=4, resident=resident)
    buffers = RouteBuffers.allocate(2, TOP_K, device)

    def step() -> torch.Tensor:
        said = []
        for layer in range(LAYERS):
            logits = torch.randn(2, EXPERTS, device=device)
            route(pool.tensors, layer, logits, torch.zeros(2, HIDDEN, device=device), TOP_K, True, buffers, None)
            said.append(logits[0].cpu())
        end_step(pool.tensors)
        return torch.stack(said)

    step()
    for steps in (3, 9):
        pool.start_trace()
        said = torch.stack([step() for _ in range(steps)])
        pool.stop_trace()
        step()
        assert pool.traced() == steps
        first = max(0, steps - 4)
        ids, logits = pool.trace_of(first, steps)
        assert ids.tolist() == said[first:].argsort(-1, descending=True)[:, :, :TOP_K].tolist()
        torch.testing.assert_close(torch.from_numpy(logits), said[first:].half())


def test_a_pool_without_room_records_nothing(device: str) -> None:
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 4, 2, TOP_K, device)
    with pytest.raises(ValueError, match="without room for a trace"):
        pool.start_trace()


def test_copies_take_time_only_where_something_is_copied(device: str) -> None:
    """Of a layer: fetched, in the background and staged. The interpreter counts copies, the GPU nanoseconds."""
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 4, 8, TOP_K, device)
    buffers = RouteBuffers.allocate(1, TOP_K, device)

    def spent() -> list[int]:
        return [layer.copied_ns for layer in pool.stats().layers]

    def grew(by: int) -> bool:
        """Only layer 1's, by so many copies."""
        before, now = grown[-1], spent()
        grown.append(now)
        more = now[1] - before[1]
        return now[0] == 0 and (more == by if device == "cpu" else (more > 0) == (by > 0) and more < 1e9)

    grown = [spent()]
    assert grown == [[0, 0]]
    fetch(pool.tensors, 1, banks[1], buffers)
    pool.tensors.admit[1, at.ADMIT_COUNT.value] = 0
    admit(pool.tensors, 1, banks[1])
    assert grew(0)
    buffers.fetch.count[0] = 2
    fetch(pool.tensors, 1, banks[1], buffers)
    assert grew(1)
    pool.tensors.admit[1, at.ADMIT_COUNT.value] = 1
    admit(pool.tensors, 1, banks[1])
    assert grew(1)
    routes = route_prefill(pool.tensors, 1, torch.randn(3, EXPERTS, device=device), TOP_K, True)
    for number in range(routes.rounds):
        stage(pool.tensors, banks[1], routes, number)
    assert grew(int((routes.missing.count > 0).sum()))
    assert pool.stats().total.copied_ns == grown[-1][1]
