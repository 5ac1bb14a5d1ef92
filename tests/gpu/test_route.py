"""The routing kernel against the plain rules of cache_model.py, over random steps, and against the torch router."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import LaneCosts
from ftengine.kernels.triton.buffers import Mailbox, RouteBuffers
from ftengine.kernels.triton.fetch import admit, fetch
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.victims import end_step
from tests.gpu.cache_model import CacheModel, Decision
from tests.gpu.cache_setup import HIDDEN, held_by, make_banks, make_mailbox

LAYERS, EXPERTS, TOP_K = 3, 16, 4
COSTS = LaneCosts(3.0, 35.0, 8.0, 26.0)


@dataclass
class Bench:
    """A pool on the device and the model of it."""

    pool: SlotPool
    model: CacheModel
    banks: dict[int, ExpertBank]
    buffers: RouteBuffers
    mailbox: Mailbox | None
    tokens: int
    policy: str

    def step(self, device: str) -> None:
        for layer in range(LAYERS):
            self.layer(layer, device)
        end_step(self.pool.tensors)
        score = self.pool.tensors.score.tolist()
        self.model.end_step({(layer, e): score[layer][e] for layer in range(LAYERS) for e in range(EXPERTS)})
        assert self.table() == self.model.table
        assert self.pool.tensors.queue[: self.model.slots].tolist() == [slot for slot, _ in self.model.queue]
        for (layer, expert), slot in self.model.table.items():
            assert held_by(self.pool, slot) == layer * EXPERTS + expert

    def layer(self, layer: int, device: str) -> None:
        # Some locality: half of the logits stay from step to step.
        logits = torch.randn(self.tokens, EXPERTS, device=device) + 1.5 * taste(layer, device)
        hidden = torch.randn(self.tokens, HIDDEN, device=device)
        before = self.pool.tensors.score[layer].tolist()
        rung = int(self.mailbox.bell[0]) if self.mailbox else 0
        pool = self.pool.tensors
        route(pool, layer, logits, hidden, TOP_K, True, self.buffers, self.mailbox)
        fetch(pool, layer, self.banks[layer], self.buffers)
        admit(pool, layer, self.banks[layer])
        weights, ids = reference_router(logits)
        assert self.buffers.ids.tolist() == ids.tolist()
        torch.testing.assert_close(self.buffers.weights, weights, rtol=1e-5, atol=1e-7)
        after = dict(enumerate(pool.score[layer].tolist()))
        worth = dict(enumerate(before)) if self.policy == "lru" else after
        decision = self.model.route(layer, list(dict.fromkeys(ids.flatten().tolist())), worth, after)
        self.check_gpu(layer, decision, ids, weights)
        self.check_cpu(layer, decision, ids, weights, hidden, rung)

    def check_gpu(self, layer: int, decision: Decision, ids: torch.Tensor, weights: torch.Tensor) -> None:
        fetched = int(self.buffers.fetch.count)
        listed = zip(self.buffers.fetch.expert[:fetched].tolist(), self.buffers.fetch.slot[:fetched].tolist())  # noqa: B905
        assert list(listed) == decision.fetched
        chosen = self.buffers.chosen
        place = dict(decision.fetched) | {expert: self.model.table[layer, expert] for expert in decision.hits}
        expected = [expert for expert in dict.fromkeys(ids.flatten().tolist()) if expert in place]
        assert int(chosen.count) == len(expected)
        assert chosen.slot[: len(expected)].tolist() == [place[expert] for expert in expected]
        ready = [row for row, expert in enumerate(expected) if expert in decision.hits]
        arriving = [row for row, expert in enumerate(expected) if expert not in decision.hits]
        assert int(chosen.ready) == len(ready)
        assert chosen.turn[: len(expected)].tolist() == ready + arriving
        for row, expert in enumerate(expected):
            assert held_by(self.pool, place[expert]) == layer * EXPERTS + expert
            mine = torch.where(ids == expert, weights, 0).sum(1)
            torch.testing.assert_close(chosen.combine[row], mine, rtol=1e-5, atol=1e-7)

    def check_cpu(
        self, layer: int, decision: Decision, ids: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor, rung: int
    ) -> None:
        if self.mailbox is None:
            assert not decision.cpu
            return
        assert int(self.mailbox.bell[0]) == rung + bool(decision.cpu)
        if decision.cpu:
            assert self.mailbox.bell[1:4].tolist() == [layer, self.tokens, TOP_K]
            for token, row in enumerate(ids.tolist()):
                assert self.mailbox.ids[token].tolist() == [e if e in decision.cpu else -1 for e in row]
            torch.testing.assert_close(self.mailbox.weights, weights.cpu(), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(self.mailbox.rows, hidden.cpu(), rtol=0, atol=0)

    def table(self) -> dict[tuple[int, int], int]:
        rows = self.pool.tensors.table.tolist()
        return {(layer, e): rows[layer][e] for layer in range(LAYERS) for e in range(EXPERTS) if rows[layer][e] >= 0}


def taste(layer: int, device: str) -> torch.Tensor:
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(layer)).to(device)


def reference_router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As layers/moe.py, normalized."""
    ordered, ids = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
    weights = ordered[:, :TOP_K]
    return weights / weights.sum(-1, keepdim=True), ids[:, :TOP_K]


def make(
    device: str,
    *,
    tokens: int = 1,
    slots: int = 12,
    staging: int = EXPERTS,
    policy: str = "aged",
    share: float | None = None,
    gated: bool = True,
    budget: float = 1.0,
    cpu: bool = True,
    readable: bool = True,
) -> Bench:
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, slots, staging, TOP_K, device, policy=policy, readable=readable, costs=COSTS)
    pool.set_cpu_share(share)
    pool.set_gate(gated)
    pool.set_background(budget)
    routes = TOP_K * (1 << (tokens - 1).bit_length())
    model = CacheModel(LAYERS, slots, staging, COSTS, share, gated, budget, cpu, readable, max(32, 2 * routes))
    mailbox = make_mailbox(tokens, TOP_K, device) if cpu else None
    return Bench(pool, model, banks, RouteBuffers.allocate(tokens, TOP_K, device), mailbox, tokens, policy)


CASES = [
    {"tokens": 1, "slots": 12},
    {"tokens": 1, "slots": 12, "policy": "lru"},
    {"tokens": 2, "slots": 20, "budget": 2.0},
    {"tokens": 3, "slots": 20, "policy": "lru", "share": 0.5},
    {"tokens": 4, "slots": 30, "share": 0.0},
    {"tokens": 1, "slots": 30, "share": 0.5, "gated": False, "budget": 0.25},
    {"tokens": 2, "slots": 12, "share": 1.0},
    {"tokens": 1, "slots": 48},
    {"tokens": 1, "slots": 0},
    {"tokens": 2, "slots": 3, "staging": 0},
    {"tokens": 2, "slots": 12, "staging": 2, "share": 0.0},
    {"tokens": 2, "slots": 12, "cpu": False},
    {"tokens": 1, "slots": 12, "readable": False},
    {"tokens": 8, "slots": 24},
]
LARGEST = [{"tokens": 16, "slots": 24}, {"tokens": 16, "slots": 12, "share": 0.5}]  # steps that graphs are made of


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *((case, 5) for case in CASES),
        (LARGEST[0], 3),
        *(pytest.param(case, 100, marks=pytest.mark.slow) for case in [*CASES, *LARGEST]),
    ],
    ids=str,
)
def test_every_decision_is_the_rules(case: dict, steps: int, device: str) -> None:
    torch.manual_seed(1)
    bench = make(device, **case)
    for _ in range(steps):
        bench.step(device)
    counts = bench.pool.stats().total
    assert counts.steps == bench.model.step * LAYERS
    assert counts.fetched + counts.cpu_experts == counts.misses


def test_scores_are_aged_probabilities(device: str) -> None:
    """Against the sum over past steps in float64."""
    torch.manual_seed(2)
    bench = make(device, tokens=2)
    masses = []
    for _ in range(12):
        logits = torch.randn(2, EXPERTS, device=device)
        masses.append(logits.double().softmax(-1).sum(0))
        route(bench.pool.tensors, 1, logits, torch.zeros(2, HIDDEN, device=device), TOP_K, True, bench.buffers, None)
        end_step(bench.pool.tensors)
    aged = sum(mass * 2 ** (-(11 - step) / 8) for step, mass in enumerate(masses))
    expected = aged.log2() + 11 / 8
    torch.testing.assert_close(bench.pool.tensors.score[1].double(), expected, rtol=0, atol=1e-4)
    assert bench.pool.tensors.score[0].eq(-math.inf).all()


@pytest.mark.parametrize("policy", ["aged", "lru"])
def test_the_scale_of_scores_moves_back_and_keeps_their_order(policy: str, device: str) -> None:
    bench = make(device, policy=policy)
    bench.step(device)
    pool = bench.pool.tensors
    pool.state[1] = 4095  # ticks
    before = pool.score.clone()
    end_step(pool)
    assert int(pool.state[1]) == 0
    torch.testing.assert_close(pool.score, before - (512.0 if policy == "aged" else 4096.0), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_resident_experts_need_no_table(tokens: int, device: str) -> None:
    torch.manual_seed(3)
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 0, 0, TOP_K, device, resident=True)
    for layer in range(LAYERS):
        pool.load_layer(layer, banks[layer])
    buffers = RouteBuffers.allocate(tokens, TOP_K, device)
    logits = torch.randn(tokens, EXPERTS + 1, device=device)
    route(pool.tensors, 2, logits, torch.zeros(tokens, HIDDEN, device=device), TOP_K, True, buffers, None)
    weights, ids = reference_router(logits[:, :EXPERTS])
    torch.testing.assert_close(buffers.gates, logits[:, EXPERTS].sigmoid())
    distinct = list(dict.fromkeys(ids.flatten().tolist()))
    assert int(buffers.chosen.count) == len(distinct)
    assert buffers.chosen.slot[: len(distinct)].tolist() == [2 * EXPERTS + expert for expert in distinct]
    for row, expert in enumerate(distinct):
        assert held_by(pool, 2 * EXPERTS + expert) == 2 * EXPERTS + expert
        torch.testing.assert_close(buffers.chosen.combine[row], torch.where(ids == expert, weights, 0).sum(1))


@pytest.mark.parametrize(
    ("experts", "top_k", "normalize"), [(256, 8, True), (10, 3, False), (7, 7, True), (128, 10, True)]
)
def test_top_k_as_torch_sorts(experts: int, top_k: int, normalize: bool, device: str) -> None:
    """Equal logits too: the lower expert first. Against layers/moe.py's formula."""
    torch.manual_seed(4)
    banks = make_banks(1, experts, device)
    pool = SlotPool(banks, 0, 0, top_k, device, resident=True)
    buffers = RouteBuffers.allocate(4, top_k, device)
    logits = torch.randn(4, experts + 3, device=device)[:, :experts]
    logits[1] = (logits[1] * 2).round()
    logits[2] = torch.where(torch.arange(experts, device=device) % 2 == 0, 0.0, -0.0)
    route(pool.tensors, 0, logits, torch.zeros(4, HIDDEN, device=device), top_k, normalize, buffers, None)
    ordered, ids = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
    weights = ordered[:, :top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    assert buffers.ids.tolist() == ids[:, :top_k].tolist()
    torch.testing.assert_close(buffers.weights, weights, rtol=1e-5, atol=1e-7)
    assert buffers.gates.tolist() == [1.0] * 4


def test_what_cannot_be_routed_is_refused(device: str) -> None:
    bench = make(device, tokens=2, staging=4, cpu=False)
    logits, hidden = torch.zeros(2, EXPERTS, device=device), torch.zeros(2, HIDDEN, device=device)
    with pytest.raises(ValueError, match="need 8 staging slots"):
        route(bench.pool.tensors, 0, logits, hidden, TOP_K, True, bench.buffers, None)
    with pytest.raises(ValueError, match="1 to 16 rows"):
        route(bench.pool.tensors, 0, torch.zeros(17, EXPERTS), torch.zeros(17, 8), TOP_K, True, bench.buffers, None)
