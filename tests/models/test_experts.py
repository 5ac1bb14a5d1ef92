"""Expert kernels, executor and MoE layer against their formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ftengine.experts.executor import HostExecutor, Routes
from ftengine.experts.pool import ExpertBank, ExpertPool
from ftengine.kernels import reference, table
from ftengine.layers.linear import Linear, SwiGlu
from ftengine.layers.moe import MoeLayer, Router, SharedExpert

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 6, 32, 48, 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bank(dtype: torch.dtype = torch.float32) -> ExpertBank:
    return ExpertBank(
        torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).mul_(0.3).to(dtype),
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).mul_(0.3).to(dtype),
    )


def expert_output(experts: ExpertBank, expert: int, state: torch.Tensor) -> torch.Tensor:
    gate, up = (experts.gate_up[expert].double() @ state.double()).chunk(2)
    return experts.down[expert].double() @ (gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 19, 400])
@pytest.mark.parametrize("kernel", [reference.moe_experts, table.moe_experts], ids=["reference", "table"])
def test_moe_experts_adds_the_weighted_sum(kernel: object, tokens: int, dtype: torch.dtype) -> None:
    """Route by route in float64, on top of what `out` held; a negative id adds nothing."""
    experts = bank(dtype)
    hidden = torch.randn(tokens, HIDDEN).to(dtype)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    ids[torch.rand(tokens, TOP_K) < 0.2] = -1
    weights = torch.rand(tokens, TOP_K)
    start = torch.randn(tokens, HIDDEN)
    out = start.clone()
    kernel(hidden, ids, weights, experts.gate_up, experts.down, out)  # type: ignore[operator]
    expected = start.double()
    for token in range(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if expert >= 0:
                expected[token] += weight * expert_output(experts, expert, hidden[token])
    error = (out - expected).square().mean().sqrt() / (expected - start).square().mean().sqrt()
    assert error < (1e-5 if dtype == torch.float32 else 0.01)


def test_partial_sums_of_several_executors_add_up() -> None:
    """Routes dealt out over two executors, each computing its own share, against one that computes all."""
    pool = ExpertPool()
    pool.add(4, bank())
    hidden, weights = torch.randn(10, HIDDEN), torch.rand(10, TOP_K)
    ids = torch.rand(10, EXPERTS).topk(TOP_K).indices
    mine = torch.rand(10, TOP_K) < 0.5
    together, shared = torch.zeros(10, HIDDEN), torch.zeros(10, HIDDEN)
    HostExecutor(pool).add_partial(hidden, Routes(4, ids, weights), together)
    for share in (mine, ~mine):
        HostExecutor(pool).add_partial(hidden, Routes(4, ids.masked_fill(~share, -1), weights), shared)
    torch.testing.assert_close(shared, together, atol=1e-5, rtol=1e-5)


def test_the_pool_is_addressed_by_layer_and_expert() -> None:
    pool, first, second = ExpertPool(), bank(), bank()
    pool.add(1, first)
    pool.add(3, second)
    gate_up, down = pool.expert(3, 2)
    assert torch.equal(gate_up, second.gate_up[2])
    assert torch.equal(down, second.down[2])
    assert pool.bank(1).experts == EXPERTS
    assert pool.nbytes == 2 * 4 * EXPERTS * 3 * INTERMEDIATE * HIDDEN


@pytest.mark.parametrize("normalize", [True, False])
def test_moe_layer(normalize: bool) -> None:
    """Softmax over all experts, the best few, a shared expert with a sigmoid gate; on top of the residual."""
    pool = ExpertPool()
    pool.add(0, bank())
    router = Router(0, torch.randn(EXPERTS, HIDDEN), TOP_K, normalize)
    mlp = SwiGlu(Linear(torch.randn(20, HIDDEN) * 0.3), Linear(torch.randn(HIDDEN, 10) * 0.3))
    layer = MoeLayer(router, HostExecutor(pool), SharedExpert(mlp, Linear(torch.randn(1, HIDDEN))))
    hidden, residual = torch.randn(7, HIDDEN), torch.randn(7, HIDDEN)
    expected = residual.double()
    layer.add_to(residual, hidden)
    assert layer.shared is not None
    for token, state in enumerate(hidden.double()):
        probabilities = (router.weight.double() @ state).exp()
        probabilities /= probabilities.sum()
        chosen = sorted(range(EXPERTS), key=lambda expert: -float(probabilities[expert]))[:TOP_K]
        total = probabilities[chosen].sum() if normalize else 1.0
        for expert in chosen:
            expected[token] += probabilities[expert] / total * expert_output(pool.bank(0), expert, state)
        gate, up = (mlp.gate_up.weight.double() @ state).chunk(2)
        gated = mlp.down.weight.double() @ (F.silu(gate) * up)
        expected[token] += torch.sigmoid(layer.shared.gate.weight[0].double() @ state) * gated
    torch.testing.assert_close(residual.double(), expected, atol=1e-4, rtol=1e-4)
