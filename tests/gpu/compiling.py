"""Compiling ahead: Triton's own compiler, for a GPU that need not be there; what it makes is looked up where
JITFunction.run will look. test_precompile.py runs these tests in a process of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ftengine.kernels.triton.precompile import precompile
from tests.gpu.hopper import Hopper


@pytest.fixture(autouse=True)
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FT_PRECOMPILE", raising=False)
    before = JITFunction.run, Autotuner.run, Autotuner._bench
    yield
    assert (JITFunction.run, Autotuner.run, Autotuner._bench) == before


def add(x, count, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x + at, tl.load(x + at, at < count) + 1, at < count)


def wrong(x, count, N: tl.constexpr):
    tl.store(x + tl.arange(0, N + 1), count)  # not a power of two


def compiled(kernel: JITFunction) -> int:
    return len(kernel.device_caches[0][0])


def silent(done: int, count: int) -> None:
    pass


def test_each_kind_of_launch_is_compiled_once_and_none_is_made() -> None:
    kernel, x = JITFunction(add), torch.zeros(1024)
    said: list[tuple[int, int]] = []

    def launch() -> None:
        for count in (1024, 512, 1000):  # of which 16 divides two
            for size in (128, 256):
                kernel[(8,)](x, count, N=size, num_warps=4)

    assert precompile(launch, lambda done, count: said.append((done, count))) == 4
    assert compiled(kernel) == 4
    assert said == [(number, 4) for number in range(1, 5)]
    assert not x.any()
    found = {key: one.hash for key, one in kernel.device_caches[0][0].items()}
    # Launches of these kinds need no compiler any more.
    assert precompile(launch, lambda done, count: said.append((done, count))) == 4
    assert {key: one.hash for key, one in kernel.device_caches[0][0].items()} == found
    assert len(said) == 4


def test_all_configurations_of_a_tuned_kernel_are_compiled_and_none_is_timed() -> None:
    kernel, x = JITFunction(add), torch.zeros(1024)
    configs = [triton.Config({"N": size}, num_warps=warps) for size in (64, 128) for warps in (1, 2)]
    tuned = Autotuner(kernel, kernel.arg_names, configs, ["count"], None, None)
    assert precompile(lambda: tuned[(8,)](x, 1024), silent) == 4
    assert compiled(kernel) == 4
    assert not tuned.cache  # so that its first launch times them
    tuned.cache[(2048, "torch.float32")] = configs[0]
    assert precompile(lambda: tuned[(8,)](x, 2048), silent) == 1


def test_a_kernel_that_does_not_compile_is_left_to_its_launch() -> None:
    good, bad, x = JITFunction(add), JITFunction(wrong), torch.zeros(1024)

    def launch() -> None:
        bad[(1,)](x, 1024, N=64)
        good[(1,)](x, 1024, N=64)

    assert precompile(launch, silent) == 2
    assert compiled(good) == 1
    with pytest.raises(triton.compiler.errors.CompilationError):
        bad[(1,)](x, 1024, N=64)


def test_what_fails_on_the_way_is_logged_and_costs_only_time(caplog: pytest.LogCaptureFixture) -> None:
    kernel, x = JITFunction(add), torch.zeros(1024)

    def launch() -> None:
        kernel[(1,)](x, 1024, N=64)
        raise RuntimeError("no memory left")

    with caplog.at_level(logging.WARNING):
        assert precompile(launch, silent) == 0
    assert "compiled one by one: RuntimeError: no memory left" in caplog.text
    assert compiled(kernel) == 1


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_PRECOMPILE", "0")

    def launch() -> None:
        raise AssertionError("launched")

    assert precompile(launch, silent) == 0
