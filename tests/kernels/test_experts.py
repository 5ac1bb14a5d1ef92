"""Routed experts on packed blocks, of every format and version that runs here, against float64 formulas in torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import FORMATS, ExpertLayout, Format
from ftengine.formats.pack import ExpertBiases, pack_expert
from ftengine.formats.quantize import quantize
from ftengine.kernels import native
from tests.kernels.packed_cases import ALL_FORMATS, DTYPES, activations

_native = pytest.importorskip("ftengine._native")
VERSIONS = native.instruction_sets()
ALPHA, LIMIT = 1.702, 7.0
# The activations between the two products are rounded to the hidden rows' type.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


class Bank:
    """`experts` random experts as blocks, and as float64 matrices."""

    def __init__(self, kind: Format, hidden: int, intermediate: int, experts: int = 5, bias: bool = False) -> None:
        self.layout = ExpertLayout(hidden, intermediate, kind, kind, bias)
        self.plain, blocks = [], []
        for _ in range(experts):
            shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
            parts = [quantize(torch.randn(shape) * shape[1] ** -0.5, kind) for shape in shapes]
            biases = ExpertBiases(*(torch.randn(shape[0]) for shape in shapes)) if bias else None
            self.plain.append(([dequantize(part).double() for part in parts], biases))
            blocks.append(pack_expert(self.layout, *parts, biases))
        self.blocks = torch.stack(blocks)

    def formula(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, clamped: bool) -> torch.Tensor:
        out = torch.zeros(len(x), self.layout.hidden, dtype=torch.float64)
        for token, expert in (ids >= 0).nonzero().tolist():
            (gate, up, down), biases = self.plain[ids[token, expert]]
            row = x[token, : self.layout.hidden].double()
            g, u = gate @ row, up @ row
            if biases is not None:
                g, u = g + biases.gate, u + biases.up
            if clamped:  # transformers, GptOssExperts
                g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
                act = g * torch.sigmoid(ALPHA * g) * (u + 1)
            else:
                act = torch.nn.functional.silu(g) * u
            result = down @ act
            if biases is not None:
                result = result + biases.down
            out[token] += weights[token, expert].double() * result
        return out

    def run(self, x, ids, weights, isa: str = "", threads: int = 1, clamped: bool = False, out=None) -> torch.Tensor:
        layout = self.layout
        out = torch.zeros(len(x), layout.hidden) if out is None else out
        _native.experts_packed(
            x, ids, weights, self.blocks, layout.hidden, layout.intermediate, layout.gate_up.number,
            layout.down.number, layout.bias, clamped, ALPHA, LIMIT, out, threads, isa,
        )  # fmt: skip
        return out


def routes(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some not taken, some twice in a row."""
    return torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32), torch.rand(tokens, top_k)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max().clamp_min(1))


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
def test_equals_the_formula_in_float64(kind: Format, isa: str) -> None:
    for hidden, intermediate in ((64, 32), (40, 50), (96, 48)):
        bank = Bank(kind, hidden, intermediate)
        for dtype in DTYPES:
            for tokens in (1, 3, 24):
                x, (ids, weights) = activations(tokens, hidden, dtype), routes(tokens, 3, 5)
                assert close(bank.run(x, ids, weights, isa), bank.formula(x, ids, weights, False), dtype)


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_clamped_unit_with_and_without_biases(isa: str, bias: bool) -> None:
    bank = Bank(FORMATS["mxfp4"], 64, 40, bias=bias)
    for dtype in DTYPES:
        x, (ids, weights) = activations(9, 64, dtype) * 8, routes(9, 2, 5)  # beyond the limit
        assert close(bank.run(x, ids, weights, isa, clamped=True), bank.formula(x, ids, weights, True), dtype)


@pytest.mark.parametrize("isa", VERSIONS)
def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    bank = Bank(FORMATS["nvfp4"], 160, 96)
    for tokens in (1, 30):
        x, (ids, weights) = activations(tokens, 160, torch.bfloat16), routes(tokens, 4, 5)
        one = bank.run(x, ids, weights, isa)
        assert all(torch.equal(one, bank.run(x, ids, weights, isa, threads)) for threads in (2, 3))


def test_adds_to_out_and_leaves_it_alone_without_routes() -> None:
    bank = Bank(FORMATS["bf16"], 64, 32)
    x, (ids, weights) = activations(4, 64, torch.float32), routes(4, 2, 5)
    before = torch.randn(4, 64)
    found = bank.run(x, ids, weights, out=before.clone())
    assert close(found, before.double() + bank.formula(x, ids, weights, False), torch.float32)
    none = torch.full((4, 2), -1, dtype=torch.int32)
    assert torch.equal(bank.run(x, none, weights, out=before.clone()), before)
    assert torch.equal(bank.run(x, ids[:, :0], weights[:, :0], out=before.clone()), before)
    assert bank.run(x[:0], ids[:0], weights[:0]).shape == (0, 64)


@pytest.mark.parametrize("isa", VERSIONS)
def test_nan_and_infinity_reach_their_token_only(isa: str) -> None:
    bank = Bank(FORMATS["fp8"], 64, 48)
    for dtype in DTYPES:
        for bad in (torch.nan, torch.inf):
            x, ids, weights = activations(3, 64, dtype), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
            x[1, 7] = bad
            found = bank.run(x, ids, weights, isa)
            assert not found[1].isfinite().any()
            assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("isa", VERSIONS)
def test_gates_of_any_size_stay_finite(isa: str) -> None:
    """silu(-1e4) is -0, silu(1e4) is 1e4: no overflow of the exponential may show."""
    bank = Bank(FORMATS["f32"], 32, 32)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    for factor in (1e-12, 1e2, 1e4):
        x = activations(1, 32, torch.float32) * factor
        expected = bank.formula(x, ids, weights, False)
        found = bank.run(x, ids, weights, isa).double()
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"expert_ids": torch.full((2, 2), 5, dtype=torch.int32)}, ValueError, "expert id 5 is out of range"),
        ({"weights": torch.zeros(2, 3)}, ValueError, "weights must have"),
        ({"expert_ids": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "expert_ids must have"),
        ({"intermediate": 600}, ValueError, "blocks must be"),
        ({"out": torch.zeros(2, 63)}, ValueError, "out must be"),
        ({"down_format": -1}, ValueError, "down_format -1"),
        ({"threads": 0}, ValueError, "threads"),
    ],
)
def test_bad_arguments_are_refused(change: dict, error: type[Exception], text: str) -> None:
    arguments = {
        "hidden": torch.zeros(2, 64), "expert_ids": torch.zeros(2, 2, dtype=torch.int32), "weights": torch.zeros(2, 2),
        "blocks": Bank(FORMATS["bf16"], 64, 32).blocks, "hidden_size": 64, "intermediate": 32, "gate_up_format": 2,
        "down_format": 2, "bias": False, "clamped": False, "alpha": ALPHA, "limit": LIMIT, "out": torch.zeros(2, 64),
    }  # fmt: skip
    with pytest.raises(error, match=text):
        _native.experts_packed(**(arguments | change))


STARVED = """
import resource, threading
import psutil, torch
from ftengine import _native
from ftengine.formats.format import BF16, ExpertLayout

def run(tokens, top_k, hidden, intermediate, threads):
    layout, out = ExpertLayout(hidden, intermediate, BF16, BF16), torch.zeros(tokens, hidden)
    blocks = torch.ones(layout.block_bytes // 2, dtype=torch.bfloat16).view(torch.uint8).view(1, -1)
    x, ids = torch.full((tokens, hidden), 1e-3), torch.zeros(tokens, top_k, dtype=torch.int32)
    _native.experts_packed(
        x, ids, torch.ones(tokens, top_k), blocks, hidden, intermediate, BF16.number, BF16.number, layout.bias, False,
        0.0, 0.0, out, threads,
    )
    return out

def another():
    assert all(torch.equal(run(16, 1, 2048, 512, 2), expected) for _ in range(3))
    print("as usual")

run(1, 1, 32, 64, 2)
expected = run(16, 1, 2048, 512, 1)
held = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), resource.RLIM_INFINITY))
try:
    run(4096, 8, 32, 1 << 16, 2)
except MemoryError:
    print("refused")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
thread = threading.Thread(target=another, daemon=True)
thread.start()
thread.join(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited")
def test_without_memory_for_the_routes_it_is_refused_and_the_next_call_is_as_usual() -> None:
    """8 GiB of activations where one GiB is left, in a process of its own: threads that wait for ever would stay."""
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.strip()) == (0, "refused\nas usual"), done.stderr
