"""Compiling ahead: Triton's own compiler, for a GPU that need not be there; what it makes is looked up where
JITFunction.run will look. test_precompile.py runs these tests in a process of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ftengine.kernels.triton.precompile import kinds, precompile
from ftengine.kernels.triton.source_keys import read_sources
from tests.gpu.hopper import Hopper


class Unloading(Hopper):
    """From Triton 3.8 on kernels that were loaded are unloaded when they go, by the driver of that moment."""

    def __init__(self) -> None:
        self.utils = self

    def unload_module(self, module: int) -> None:
        pass


@pytest.fixture(autouse=True)
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    driver._active = Unloading()  # until this process ends: kernels go when it pleases the collector
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


WIDTH = tl.constexpr(64)


@JITFunction
def inner(x):
    return x + WIDTH


@JITFunction
def outer(x):
    tl.store(x, inner(tl.load(x)))


def test_a_kernels_key_does_not_depend_on_what_was_launched_before() -> None:
    """Triton's own would: the constants of a called function were known then, or not."""
    keys = set()
    for functions in ((inner, outer), (outer, inner)):
        for function in functions:
            function.hash, function.used_global_vals = None, {}
        for function in functions:
            _ = function.cache_key
        keys.add((inner.cache_key, outer.cache_key))
    assert len(keys) == 1
    assert any(name == "WIDTH" for name, _ in outer.used_global_vals)


def test_sources_are_read_ahead_and_what_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(self: JITFunction) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    inner.hash = outer.hash = None
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "parse", parse)
        assert read_sources([__name__]) == 0
    assert inner.hash is outer.hash is None
    assert read_sources([__name__]) == 2
    assert inner.hash
    assert outer.hash
    assert read_sources(["no.such.package"]) == 0


class Loading(Unloading):
    """Notes what is loaded, and by which thread. fails: nothing can be."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, str]] = []
        self.fails = False

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *args: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        if self.fails:
            raise RuntimeError("out of memory")
        self.loaded.append((name, threading.current_thread().name))
        return 1, 1, 0, 0, 1024


@pytest.fixture
def driving(monkeypatch: pytest.MonkeyPatch) -> Loading:
    found = Loading()
    monkeypatch.setattr(driver, "_active", found)
    return found


def test_kernels_are_loaded_by_the_threads_that_compile_them(driving: Loading) -> None:
    kernel, x = JITFunction(add), torch.zeros(1024)
    assert precompile(lambda: [kernel[(8,)](x, 1024, N=size) for size in (128, 256)] and None, silent) == 2
    assert [name for name, _ in driving.loaded] == ["add", "add"]
    assert all(thread.startswith("compile") for _, thread in driving.loaded)
    kernel[(8,)](x, 1024, N=128)
    assert len(driving.loaded) == 2


def test_what_cannot_be_loaded_is_left_to_its_launch(driving: Loading) -> None:
    driving.fails = True
    kernel, x = JITFunction(add), torch.zeros(1024)
    assert precompile(lambda: kernel[(8,)](x, 1024, N=128), silent) == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        kernel[(8,)](x, 1024, N=128)
    driving.fails = False
    kernel[(8,)](x, 1024, N=128)
    assert [thread for _, thread in driving.loaded] == [threading.current_thread().name]


def test_what_was_on_disk_is_told_from_what_was_compiled(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1024)
    with caplog.at_level(logging.INFO):
        for _ in range(2):  # as in two processes
            kernel = JITFunction(add)
            assert precompile(lambda: kernel[(8,)](x, 1024, N=128), silent) == 1  # noqa: B023
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("0 found on disk, 1 compiled")
    assert second.endswith("1 found on disk, 0 compiled")
    assert knobs.compilation.listener is None


def test_kinds_of_launches_are_told_apart_and_none_is_made() -> None:
    kernel, x = JITFunction(add), torch.zeros(1024)

    def launch(*counts: int) -> Callable[[], None]:
        return lambda: [kernel[(8,)](x, count, N=128) for count in counts] and None

    assert kinds(launch(512)) == kinds(launch(1024, 512)) < kinds(launch(1024, 1000))
    assert compiled(kernel) == 0
    assert not x.any()
