"""The native expert kernels against the formula in float64, in every version that this processor can execute."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.kernels import native

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason=native.REASON)
ISAS = native.instruction_sets()
DTYPES = [torch.float32, torch.bfloat16]


def formula(hidden, expert_ids, weights, gate_up, down):
    """The definition, route by route, in float64 and without any kernel under test."""
    x, w, g, d = (tensor.double().numpy() for tensor in (hidden, weights, gate_up, down))
    out = np.zeros_like(x)
    for t, k in np.ndindex(*expert_ids.shape):
        e = int(expert_ids[t, k])
        if e >= 0:
            gate, up = np.split(g[e] @ x[t], 2)
            with np.errstate(over="ignore"):
                out[t] += w[t, k] * (d[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def layer(tokens, hidden, intermediate, experts, top_k, hidden_dtype=torch.float32, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, hidden, generator=random).to(hidden_dtype),
        torch.randint(-1, experts, (tokens, top_k), generator=random),
        torch.rand(tokens, top_k, generator=random),
        (torch.randn(experts, 2 * intermediate, hidden, generator=random) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, intermediate, generator=random) / intermediate**0.5).to(dtype),
    )


def run(arguments, **options):
    out = torch.zeros(arguments[0].shape)
    native.moe_experts(*arguments, out, **options)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 11),
    hidden=st.integers(1, 90),
    intermediate=st.integers(1, 90),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_equals_the_formula(isa, dtype, hidden_dtype, tokens, hidden, intermediate, experts, top_k, threads, seed):
    arguments = layer(tokens, hidden, intermediate, experts, top_k, hidden_dtype, dtype, seed)
    out = run(arguments, threads=threads, isa=isa)
    np.testing.assert_allclose(out.numpy(), formula(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_equals_the_formula_at_a_real_size(isa, tokens):
    arguments = layer(tokens, 576, 1536, 4, 2, torch.bfloat16, torch.bfloat16)
    np.testing.assert_allclose(run(arguments, threads=2, isa=isa).numpy(), formula(*arguments), rtol=1e-4, atol=1e-4)


def test_adds_to_what_is_there():
    arguments = layer(3, 8, 8, 2, 2)
    out = torch.ones(3, 8)
    native.moe_experts(*arguments, out)
    np.testing.assert_allclose(out.numpy(), 1 + formula(*arguments), rtol=1e-5, atol=1e-5)


def test_same_bits_with_any_number_of_threads():
    arguments = layer(9, 130, 300, 4, 2)
    alone = run(arguments, threads=1)
    assert all(torch.equal(run(arguments, threads=n), alone) for n in (2, 3, 8))


def test_int32_ids_and_a_repeated_expert():
    hidden, _, weights, gate_up, down = layer(4, 16, 8, 3, 3)
    ids = torch.tensor([[2, 2, 2], [0, 2, 0], [1, 1, 0], [-1, 2, -7]])
    expected = formula(hidden, ids, weights, gate_up, down)
    for kind in (torch.int32, torch.int64):
        out = run((hidden, ids.to(kind), weights, gate_up, down))
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_no_route_taken_changes_nothing():
    hidden, ids, weights, gate_up, down = layer(4, 16, 8, 3, 2)
    assert torch.equal(run((hidden, torch.full_like(ids, -1), weights, gate_up, down)), torch.zeros(4, 16))


def test_a_nan_reaches_its_own_routes_only():
    hidden, _, weights, gate_up, down = layer(6, 33, 17, 3, 1)
    ids = torch.tensor([[0], [1], [2], [0], [-1], [1]])
    gate_up[1, 5, 7] = float("nan")
    hidden[0, 3] = float("nan")
    weights[3, 0] = float("inf")
    for isa in ISAS:
        out = run((hidden, ids, weights, gate_up, down), isa=isa)
        assert out.isnan().all(dim=1).tolist() == [True, True, False, False, False, True]
        assert out[3].isinf().all()
        assert out[2].isfinite().all()


def test_zero_weight_of_a_nan_is_nan():
    hidden, ids, weights, gate_up, down = layer(1, 8, 8, 1, 1)
    out = run((hidden * float("nan"), torch.zeros_like(ids), weights * 0, gate_up, down))
    assert out.isnan().all()


BAD = {
    "expert id 3": lambda a: a[1].fill_(3),
    "expert_ids must have the shape [4, 2]": lambda a: a.__setitem__(1, a[1][:3].contiguous()),
    "weights must have the shape": lambda a: a.__setitem__(2, a[2][:, :1].contiguous()),
    "gate_up must have the shape": lambda a: a.__setitem__(3, a[3][:, :7].contiguous()),
    "hidden, intermediate": lambda a: a.__setitem__(4, a[4][0]),
    "out must have the shape": lambda a: a.__setitem__(5, a[5][:3]),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(message):
    arguments = [*layer(4, 16, 8, 3, 2), torch.zeros(4, 16)]
    BAD[message](arguments)
    with pytest.raises(ValueError) as error:
        native.moe_experts(*arguments)
    assert message in str(error.value)
    assert not arguments[5].any()


def test_dtypes_and_layouts_that_are_not_taken():
    hidden, ids, weights, gate_up, down = layer(4, 16, 8, 3, 2)
    out = torch.zeros(4, 16)
    for arguments in (
        (hidden.half(), ids, weights, gate_up, down, out),
        (hidden, ids.to(torch.int16), weights, gate_up, down, out),
        (hidden, ids, weights.double(), gate_up, down, out),
        (hidden, ids, weights, gate_up.bfloat16(), down, out),
        (hidden, ids, weights, gate_up, down, out.bfloat16()),
        (hidden.T.contiguous().T, ids, weights, gate_up, down, out),
        (hidden, ids, weights, gate_up, down, torch.zeros(16, 4).T),
    ):
        with pytest.raises(TypeError):
            native.moe_experts(*arguments)
    with pytest.raises(ValueError, match="cannot execute"):
        native.moe_experts(hidden, ids, weights, gate_up, down, out, isa="sse9")
    assert not out.any()


def test_callers_in_parallel_get_their_own_results():
    cases = [layer(5, 60, 40, 4, 2, seed=seed) for seed in range(6)]
    expected = [run(case, threads=1) for case in cases]
    wrong = []

    def repeat(case, right):
        wrong.extend(1 for _ in range(40) if not torch.equal(run(case, threads=3), right))

    callers = [threading.Thread(target=repeat, args=pair) for pair in zip(cases, expected, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORK = """
import os, torch
from ftengine.kernels import native
x = torch.ones(2, 8), torch.zeros(2, 1).long(), torch.ones(2, 1), torch.ones(1, 600, 8), torch.ones(1, 8, 300)
out = torch.zeros(2, 8)
native.moe_experts(*x, out, threads=2)
child = os.fork()
again = torch.zeros(2, 8)
native.moe_experts(*x, again, threads=2)
if child == 0:
    os._exit(0 if torch.equal(out, again) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_has_a_pool_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr


def test_features_agree_with_the_operating_system():
    try:
        with open("/proc/cpuinfo") as file:
            flags = next(line for line in file if line.startswith("flags")).split()
    except (OSError, StopIteration):
        pytest.skip("no x86 flags in /proc/cpuinfo")
    reported = set(native.cpu_features())
    for ours, theirs in {
        "avx2": "avx2",
        "avx512": "avx512bw",
        "avx512_vnni": "avx512_vnni",
        "avx_vnni": "avx_vnni",
        "avx512_bf16": "avx512_bf16",
        "amx_bf16": "amx_bf16",
        "amx_int8": "amx_int8",
    }.items():
        assert (ours in reported) == (theirs in flags), ours
    assert [isa for isa in ("avx512", "avx2") if isa in reported] + ["portable"] == ISAS


def test_the_front_can_ask_without_torch():
    code = "import sys; from ftengine.kernels import native; native.cpu_features(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
