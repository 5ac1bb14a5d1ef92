"""What kernels compute in caches, and that predictions for AVX2 go by it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

pytest.importorskip("ftengine._native", reason="the kernels are not built")

import torch

from ftengine import _native
from ftengine.formats.format import BF16, NVFP4, Format
from ftengine.formats.pack import pack
from ftengine.formats.quantize import quantize
from ftengine.kernels import native
from ftlaunch.machine import bundled, hits, kernel_rate, predict
from ftlaunch.machine.fit import Fit
from ftlaunch.machine.kernel_rate import KernelRate, measured
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.speed import Machine, Speed
from ftlaunch.machine.speed import predict as predicted

LANE = 30e9  # bytes a second, of memory


def told(name: str, computes: KernelRate | None) -> Speed:
    made = predicted(
        bundled.model(name), Fit("cpu", threads=2), Machine(lane=LANE, threads=2, computes=computes), hits.expected(1.0)
    )
    assert made is not None
    return made


def best_of(kind: Format, tokens: int, isa: str) -> float:
    """Seconds of one thread for weights and activations that are no zeros."""
    packed, x = pack(quantize(torch.randn(256, 2048), kind)).data, torch.randn(tokens, 2048)
    out, best = torch.empty(tokens, 256), float("inf")
    for _ in range(200 // tokens):
        begin = time.perf_counter()
        _native.linear_packed(x, packed, 256, 2048, kind.number, out, threads=1, isa=isa)
        best = min(best, time.perf_counter() - begin)
    return best


def test_it_is_what_kernels_do_with_other_numbers() -> None:
    """Medians of five, in turn: the machine may be busy."""
    isa, ratios = native.kernel_choice()[0], []
    for _ in range(5):
        found = measured(1, isa)
        assert found is not None
        one, many = best_of(NVFP4, 1, isa), best_of(BF16, kernel_rate.PROMPT, isa)
        products = kernel_rate.WHOLE * kernel_rate.PROMPT * 256 * 2048 / many
        ratios.append((found.bytes * one / NVFP4.matrix_bytes(256, 2048), found.products / products))
    for of_one in zip(*ratios, strict=True):
        assert 0.6 < sorted(of_one)[2] < 1.7


def test_a_rate_of_weights_that_is_less_than_memory_s_decides() -> None:
    """FP4 weights by what is unpacked, BF16 ones by what is read; prompts by what is computed."""
    fast, slow = KernelRate(60e9, 50e9), KernelRate(10e9, 25e9)
    four_bits = "qwen3.6-35b-a3b-nvfp4"
    assert told(four_bits, fast).decode_terms[0].bandwidth == LANE
    assert told(four_bits, slow).decode_terms[0].bandwidth == 10e9
    assert told("demo", slow).decode == told("demo", fast).decode
    computing = [told("demo", rate).prompt_terms[0].ms.likely for rate in (slow, fast)]
    assert computing[0] == pytest.approx(2 * computing[1])
    assert told(four_bits, None).decode_terms[0].bandwidth == 14e9, "two cores of 7 GB/s, where nothing was measured"


def test_experts_beside_a_gpu_are_computed_no_faster() -> None:
    """Where no lane was measured: FP4 experts by what is unpacked, BF16 ones by a share of what is read."""
    machine = Machine(host=LANE, lane=LANE, link=20e9, threads=2)
    for name, slower in (("qwen3.6-35b-a3b-nvfp4", True), ("qwen3.6-35b-a3b", False)):
        model = bundled.model(name)
        fast, slow = (
            predict.assumed_lanes(model, replace(machine, computes=KernelRate(rate, 1e9))) for rate in (60e9, 8e9)
        )
        assert fast is not None
        assert slow is not None
        assert fast.alone.b_cpu == pytest.approx(model.sizes.block / (0.8 * LANE) * 1e6)
        assert slow.alone.b_cpu == pytest.approx(model.sizes.block / 8e9 * 1e6 if slower else fast.alone.b_cpu)


def test_it_is_measured_of_avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(known={"memory.read": {"bytes_per_second": LANE}})
    given: list[tuple[int, str]] = []

    def of_a_test(threads: int, isa: str) -> KernelRate:
        given.append((threads, isa))
        return KernelRate(1, 2)

    monkeypatch.setattr(kernel_rate, "measured", of_a_test)
    monkeypatch.delenv("FT_ISA", raising=False)
    for isa, expected in (("avx2", KernelRate(1, 2)), ("avx512_bf16", None), ("amx", None)):
        monkeypatch.setattr(native, "kernel_choice", lambda isa=isa: (isa, "of a test"))
        assert predict.machine_of(asked).computes == expected
        assert predict.machine_of(asked, measure=False).computes is None
    assert given == [(native.granted_threads(), "avx2")]


def test_without_the_library_or_such_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(1, "sse9") is None
    monkeypatch.setattr(native, "AVAILABLE", False)
    assert measured(1, "avx2") is None
