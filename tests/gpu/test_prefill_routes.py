"""Rounds of prefill: which experts lie where and when, and what stays afterwards. Against sets and sorting."""

from __future__ import annotations

import math

import pytest
import torch

from ftengine.experts.slots import SlotPool
from ftengine.kernels.triton.buffers import RouteBuffers
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.stage import PrefillRoutes, route_prefill, seed, slots_for_round, stage
from ftengine.kernels.triton.victims import choose_victims
from tests.gpu.cache_setup import held_by, make_banks

LAYERS, EXPERTS, TOP_K = 2, 16, 3


def chunk(pool: SlotPool, layer: int, rows: int, device: str, flat: float = 1.0) -> PrefillRoutes:
    logits = flat * torch.randn(rows, EXPERTS + 1, device=device)
    routes = route_prefill(pool.tensors, layer, logits, TOP_K, True)
    ordered, ids = logits[:, :EXPERTS].softmax(-1).sort(stable=True, dim=-1, descending=True)
    assert routes.ids.tolist() == ids[:, :TOP_K].tolist()
    weights = ordered[:, :TOP_K] / ordered[:, :TOP_K].sum(-1, keepdim=True)
    torch.testing.assert_close(routes.weights, weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(routes.gates, logits[:, EXPERTS].sigmoid())
    assert routes.counts.tolist() == ids[:, :TOP_K].flatten().bincount(minlength=EXPERTS).tolist()
    return routes


@pytest.mark.parametrize(
    ("rows", "slots", "staging", "policy", "readable"),
    [
        (40, 12, 8, "aged", True),
        (2, 5, 4, "aged", True),
        (40, 32, 6, "lru", True),
        (20, 0, 32, "aged", True),
        (17, 3, 6, "aged", False),
    ],
)
def test_each_route_has_its_expert_in_one_round(
    rows: int, slots: int, staging: int, policy: str, readable: bool, device: str
) -> None:
    torch.manual_seed(rows)
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, slots, staging, TOP_K, device, policy=policy, readable=readable)
    for layer in (0, 1, 0):
        before = table(pool)
        routes = chunk(pool, layer, rows, device)
        used = set(routes.ids.flatten().tolist())
        missing = {expert for expert in used if (layer, expert) not in before}
        times = torch.zeros(rows, TOP_K)
        staged = []
        for number in range(routes.rounds):
            stage(pool.tensors, banks[layer], routes, number)
            staged += routes.missing.expert[number * routes.half :][: int(routes.missing.count[number])].tolist()
            places = slots_for_round(routes, number)
            times += (places >= 0).cpu()
            for slot, expert in set(zip(places.flatten().tolist(), routes.ids.flatten().tolist(), strict=True)):
                assert slot < 0 or held_by(pool, slot) == layer * EXPERTS + expert
            expected = seeded(pool, layer, routes, number)
            seed(pool.tensors, layer, routes, number)
            assert table(pool) == expected
        assert (times == 1).all()
        assert sorted(staged) == sorted(missing)
        for (owner, expert), slot in table(pool).items():
            assert held_by(pool, slot) == owner * EXPERTS + expert
    assert pool.stats().total.staged > 0


def seeded(pool: SlotPool, layer: int, routes: PrefillRoutes, number: int) -> dict[tuple[int, int], int]:
    """The table that `seed` should leave."""
    after = table(pool)
    score = pool.tensors.score.tolist()
    held = {slot: key for key, slot in after.items()}
    worth = {
        slot: score[held[slot][0]][held[slot][1]] if slot in held else -math.inf for slot in range(pool.tensors.slots)
    }
    victims = sorted(worth, key=lambda slot: (worth[slot], slot))
    count = int(routes.missing.count[number])
    arrived = routes.missing.expert[number * routes.half :][:count].tolist()
    arrived.sort(key=lambda expert: (-score[layer][expert], expert))
    for expert, victim in list(zip(arrived, victims, strict=False))[: 2 * -(-pool.tensors.slots // LAYERS)]:
        if score[layer][expert] > worth[victim]:
            after = {key: slot for key, slot in after.items() if slot != victim} | {(layer, expert): victim}
    return after


def table(pool: SlotPool) -> dict[tuple[int, int], int]:
    rows = pool.tensors.table.tolist()
    return {(layer, e): rows[layer][e] for layer in range(LAYERS) for e in range(EXPERTS) if rows[layer][e] >= 0}


def test_a_prompt_counts_as_the_steady_state_of_its_frequencies(device: str) -> None:
    """Against the float64 formula, over what decoding had left."""
    torch.manual_seed(5)
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 8, 16, TOP_K, device).tensors
    buffers = RouteBuffers.allocate(1, TOP_K, device)
    route(
        pool, 0, torch.randn(1, EXPERTS, device=device), torch.zeros(1, 32, device=device), TOP_K, True, buffers, None
    )
    before = pool.score[0].double().exp2()
    routes = route_prefill(pool, 0, torch.randn(12, EXPERTS, device=device), TOP_K, True)
    aged = 2 ** (-12 / 8)
    steady = routes.counts / routes.counts.sum() / (1 - 2 ** (-1 / 8))
    torch.testing.assert_close(pool.score[0].double().exp2(), before * aged + steady * (1 - aged), rtol=1e-4, atol=1e-9)


def test_resident_experts_are_used_where_they_lie(device: str) -> None:
    torch.manual_seed(6)
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 0, 0, TOP_K, device, resident=True)
    routes = chunk(pool, 1, 9, device)
    assert routes.rounds == 1
    assert slots_for_round(routes, 0).tolist() == (routes.ids + EXPERTS).tolist()


def test_without_staging_prefill_is_refused(device: str) -> None:
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 4, 1, TOP_K, device)
    with pytest.raises(ValueError, match="2 or more staging slots"):
        route_prefill(pool.tensors, 0, torch.zeros(4, EXPERTS, device=device), TOP_K, True)


def test_the_queue_is_sorted_and_empty_slots_come_first(device: str) -> None:
    """Against a stable sort of the slots' scores."""
    torch.manual_seed(7)
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 30, 4, TOP_K, device).tensors
    pool.score.copy_(torch.randn(LAYERS, EXPERTS).round(decimals=0))
    pool.keys.copy_(torch.randperm(32)[:30] - 2)
    worth = torch.where(pool.keys >= 0, pool.score.flatten()[pool.keys.clamp(min=0)], -math.inf)
    choose_victims(pool)
    values, order = worth.sort(stable=True)
    assert pool.queue.tolist() == order.tolist()
    torch.testing.assert_close(pool.queue_score, values, rtol=0, atol=0)
