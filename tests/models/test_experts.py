"""Executor and MoE layer against their formula in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from ftengine.experts.executor import HostExecutor, Routes
from ftengine.experts.pool import ExpertPool
from ftengine.layers.moe import MoeLayer, Router
from tests.models import packing

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 6, 32, 48, 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True)
class Matrices:
    """gate, up [E, I, H]; down [E, H, I]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def output(self, expert: int, state: torch.Tensor) -> torch.Tensor:
        gate, up, down = (matrices[expert].double() for matrices in (self.gate, self.up, self.down))
        return down @ (F.silu(gate @ state.double()) * (up @ state.double()))


def experts(dtype: torch.dtype = torch.float32, *, count: int = EXPERTS) -> Matrices:
    shapes = [(count, INTERMEDIATE, HIDDEN), (count, INTERMEDIATE, HIDDEN), (count, HIDDEN, INTERMEDIATE)]
    return Matrices(*(torch.randn(shape).mul_(0.3).to(dtype) for shape in shapes))


def pool_of(layer: int, matrices: Matrices) -> ExpertPool:
    pool = ExpertPool()
    pool.add(layer, packing.bank(matrices.gate, matrices.up, matrices.down))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 19, 100])
def test_the_host_executor_adds_the_weighted_sum(tokens: int, dtype: torch.dtype) -> None:
    """Route by route in float64, on top of what `out` held; a negative id adds nothing."""
    matrices = experts(dtype)
    hidden = torch.randn(tokens, HIDDEN).to(dtype)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    ids[torch.rand(tokens, TOP_K) < 0.2] = -1
    weights = torch.rand(tokens, TOP_K)
    start = torch.randn(tokens, HIDDEN)
    out = start.clone()
    HostExecutor(pool_of(2, matrices)).add_partial(hidden, Routes(2, ids, weights), out)
    expected = start.double()
    for token in range(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if expert >= 0:
                expected[token] += weight * matrices.output(expert, hidden[token])
    error = (out - expected).square().mean().sqrt() / (expected - start).square().mean().sqrt()
    assert error < (1e-5 if dtype == torch.float32 else 0.01)


def test_partial_sums_of_several_executors_add_up() -> None:
    """Routes dealt out over two executors, each computing its own share, against one that computes all."""
    pool = pool_of(4, experts())
    hidden, weights = torch.randn(10, HIDDEN), torch.rand(10, TOP_K)
    ids = torch.rand(10, EXPERTS).topk(TOP_K).indices
    mine = torch.rand(10, TOP_K) < 0.5
    together, shared = torch.zeros(10, HIDDEN), torch.zeros(10, HIDDEN)
    HostExecutor(pool).add_partial(hidden, Routes(4, ids, weights), together)
    for share in (mine, ~mine):
        HostExecutor(pool).add_partial(hidden, Routes(4, ids.masked_fill(~share, -1), weights), shared)
    torch.testing.assert_close(shared, together, atol=1e-5, rtol=1e-5)


def test_the_pool_is_addressed_by_layer_and_expert() -> None:
    matrices = experts()
    pool = pool_of(1, experts())
    bank = packing.bank(matrices.gate, matrices.up, matrices.down)
    pool.add(3, bank)
    assert torch.equal(pool.expert(3, 2), bank.blocks[2])
    assert pool.bank(1).experts == EXPERTS
    assert pool.nbytes == 2 * EXPERTS * bank.layout.block_bytes
    assert bank.blocks.data_ptr() % 64 == 0


@pytest.mark.parametrize("normalize", [True, False])
def test_moe_layer(normalize: bool) -> None:
    """Softmax over all experts, the best few, a shared expert with a sigmoid gate; on top of the residual."""
    matrices, shared = experts(), experts(count=1)
    gates = torch.randn(EXPERTS + 1, HIDDEN)  # the last row is the shared expert's
    layer = MoeLayer(
        Router(0, packing.linear(gates[:EXPERTS], gates[EXPERTS:]), EXPERTS, TOP_K, normalize),
        HostExecutor(pool_of(0, matrices)),
        packing.swiglu(shared.gate[0], shared.up[0], shared.down[0]),
    )
    hidden, residual = torch.randn(7, HIDDEN), torch.randn(7, HIDDEN)
    expected = residual.double()
    layer.add_to(residual, hidden)
    for token, state in enumerate(hidden.double()):
        probabilities = (gates[:EXPERTS].double() @ state).exp()
        probabilities /= probabilities.sum()
        chosen = sorted(range(EXPERTS), key=lambda expert: -float(probabilities[expert]))[:TOP_K]
        total = probabilities[chosen].sum() if normalize else 1.0
        for expert in chosen:
            expected[token] += probabilities[expert] / total * matrices.output(expert, state)
        expected[token] += torch.sigmoid(gates[EXPERTS].double() @ state) * shared.output(0, state)
    torch.testing.assert_close(residual.double(), expected, atol=1e-4, rtol=1e-4)


def test_of_experts_with_equal_logits_the_first_are_chosen() -> None:
    router = Router(0, packing.linear(torch.zeros(EXPERTS, HIDDEN)), EXPERTS, TOP_K, True)
    routes, gates = router(torch.randn(4, HIDDEN))
    assert routes.expert_ids.tolist() == [[0, 1, 2]] * 4
    assert gates is None
