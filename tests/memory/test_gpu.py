"""The driver is asked in a child process: against a driver of our own, which answers, refuses, hangs or crashes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from ftengine.config import EngineConfig
from ftengine.errors import ConfigError
from ftengine.memory import gpu
from ftengine.memory.gpu import Gpu, NoGpu, choose_device, probe, refuse_at_once, refuse_without_gpu, within

T = TypeVar("T")

GIB = 1 << 30
CARD = Gpu("Fake 4060", (8, 9), 8 * GIB, 7 * GIB, 13000, 1)
OLD_DRIVER = Gpu("Fake 4060", (8, 9), 8 * GIB, 7 * GIB, 12080, 1)
NEWER = "update the NVIDIA driver to 580 or newer, then restart"


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "g++", "c++"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run([compiler, "-xc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


@pytest.fixture
def driver(fake_driver: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets what the driver does."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    return lambda word: monkeypatch.setenv("FAKE_DRIVER", word)


def test_what_a_driver_says_of_its_first_gpu(driver) -> None:
    driver("answers")
    assert probe() == Gpu("Fake 4060", (8, 9), 8 * GIB, 7 * GIB, 13000, 2)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("mismatch", "the NVIDIA driver fails: cuInit: system has unsupported display driver"),
        ("none", "the NVIDIA driver shows no GPU here"),
        ("hidden", "the NVIDIA driver shows no GPU here"),
        ("full", "the NVIDIA driver fails: cuDevicePrimaryCtxRetain: out of memory (2)"),
        ("crashes", "the NVIDIA driver ended the program that asked it (status -6)"),
        ("garbles", "the NVIDIA driver gives no sensible answer"),
    ],
)
def test_a_driver_that_is_out_of_order(driver, word: str, reason: str) -> None:
    driver(word)
    found = probe()
    assert isinstance(found, NoGpu)
    assert found.reason.startswith(reason)


def test_a_driver_that_does_not_answer_is_left(driver) -> None:
    driver("hangs")
    began = time.monotonic()
    found = probe(0.5)
    assert time.monotonic() - began < 20
    assert isinstance(found, NoGpu)
    assert "does not answer within 0.5 s" in found.reason
    for thread in threading.enumerate():
        if thread.name == "reap-driver":
            thread.join(60)
            assert not thread.is_alive(), "the child that hangs was not ended"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a child with its parent")
def test_who_asks_may_die_while_the_driver_hangs(driver) -> None:
    """As when the server is stopped during its start: the process inside the driver's call goes, too."""
    driver("hangs")
    asking = subprocess.Popen([sys.executable, "-c", "from ftengine.memory.gpu import probe; probe()"])
    children = wait_for(lambda: psutil.Process(asking.pid).children())
    # Its own end is bound to its parent's from its first lines on, well before the library is loaded.
    wait_for(lambda: any("libcuda" in entry.path for entry in children[0].memory_maps()))
    asking.kill()
    asking.wait()
    _, left = psutil.wait_procs(children, timeout=60)
    for child in left:
        child.kill()
    assert not left


def wait_for(condition: Callable[[], T]) -> T:
    """The first true value of the condition."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it does not come")


def test_a_machine_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the driver's name that is no library: nothing can be loaded, wherever the real one lies."""
    (tmp_path / "libcuda.so.1").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert probe() == NoGpu("no NVIDIA driver is installed (libcuda.so.1 is not found)")


CHOICES = [
    # asked, found, torch's CUDA, device, reason
    ("auto", CARD, "13.0", "cuda", "Fake 4060, 7.00 GiB of 8.00 GiB free"),
    ("cuda", CARD, "13.0", "cuda", "Fake 4060, 7.00 GiB of 8.00 GiB free"),
    ("auto", NoGpu("no driver"), "13.0", "cpu", "no driver"),
    ("auto", CARD, None, "cpu", f"the PyTorch that is installed is built without CUDA; {gpu.CUDA_BUILD}"),
    ("auto", OLD_DRIVER, "13.0", "cpu", f"its driver knows CUDA 12.8, PyTorch is built for 13.0; {NEWER}"),
    ("auto", OLD_DRIVER, "12.9", "cuda", "Fake 4060, 7.00 GiB of 8.00 GiB free"),
    ("cpu", CARD, "13.0", "cpu", "asked for"),
    ("cpu", NoGpu("no driver"), None, "cpu", "asked for"),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this system")
@pytest.mark.parametrize(("asked", "found", "cuda", "device", "reason"), CHOICES)
def test_the_device(asked: str, found: Gpu | NoGpu, cuda: str | None, device: str, reason: str) -> None:
    chosen = choose_device(asked, found, cuda)
    assert (chosen.value, chosen.reason) == (device, reason)


def test_an_old_gpu_is_not_used(driver) -> None:
    driver("old")
    chosen = choose_device("auto", probe(), "13.0")
    assert chosen.value == "cpu"
    assert chosen.reason == "the Fake 4060 has compute capability 7.5, 8.0 is needed"


def test_without_triton_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    chosen = choose_device("auto", CARD, "13.0")
    assert chosen.value == "cpu"
    assert chosen.reason == "Triton, which comes with PyTorch's CUDA builds, is not installed; pip install triton"


def test_what_helps_is_of_the_reason_that_is_told() -> None:
    """A newer driver does not help an old GPU, though its driver is too old, too."""
    both = Gpu("Fake 1080", (6, 1), 8 * GIB, 7 * GIB, 12080, 1)
    assert gpu.unusable(both, "13.0") == ("the Fake 1080 has compute capability 6.1, 8.0 is needed", "")
    assert choose_device("auto", both, "13.0").reason.endswith("8.0 is needed")


def test_a_gpu_that_is_asked_for_and_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no GPU here: no driver") as error:
        choose_device("cuda", NoGpu("no driver"), "13.0")
    assert error.value.next_step == "ft serve --device cpu"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this system")
def test_a_driver_older_than_pytorchs_cuda() -> None:
    """Versions within one major are compatible, others are not: CUDA Compatibility, by NVIDIA."""
    with pytest.raises(ConfigError, match=r"its driver knows CUDA 12.8, PyTorch is built for 13.0") as error:
        choose_device("cuda", OLD_DRIVER, "13.0")
    assert error.value.next_step == f"{NEWER}; until then ft serve --device cpu"


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"moe_backend": "hybrid"}, "--moe-backend hybrid"),
        ({"moe_cache_size": 5}, "--moe-cache-size"),
        ({"moe_cache_rate": 0.5}, "--moe-cache-rate"),
        ({"memory_ratio": 0.5}, "--memory-ratio"),
    ],
)
def test_settings_that_only_a_gpu_gives_a_meaning_to(values: dict, names: str) -> None:
    with pytest.raises(ConfigError, match=f"^{names} needs a GPU, and no GPU is used here: no driver$") as error:
        refuse_without_gpu(EngineConfig("my model", **values), "no driver")
    assert error.value.next_step == "ft serve --model 'my model'"
    with pytest.raises(ConfigError) as error:
        refuse_without_gpu(EngineConfig("x", device="cpu", **values), "--device cpu was given")
    assert error.value.next_step == "ft serve --model x --device cpu"
    refuse_without_gpu(EngineConfig("x", moe_backend="cpu"), "no driver")


def test_what_needs_a_gpu_is_refused_at_once(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the start's own words, which `choose_device` and `refuse_without_gpu` give."""
    driver("none")
    monkeypatch.setattr(gpu, "DEVICE_NODES", ())
    reason = probe().reason
    with pytest.raises(ConfigError, match=f"^--moe-cache-size needs a GPU, and no GPU is used here: {reason}$"):
        refuse_at_once(EngineConfig("x", moe_cache_size=5))
    with pytest.raises(ConfigError, match=f"^no GPU here: {reason}$"):
        refuse_at_once(EngineConfig("x", device="cuda"))
    with pytest.raises(
        ConfigError, match=r"^--memory-ratio needs a GPU, and no GPU is used here: --device cpu was given$"
    ):
        refuse_at_once(EngineConfig("x", device="cpu", memory_ratio=0.5))
    refuse_at_once(EngineConfig("x"))
    driver("answers")
    refuse_at_once(EngineConfig("x", moe_cache_size=5))


def test_where_there_may_be_a_gpu_the_start_asks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slow driver would be asked twice; nor is one asked for what needs none."""

    def asked() -> NoGpu:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(gpu, "probe", asked)
    refuse_at_once(EngineConfig("x", device="cpu"))
    refuse_at_once(EngineConfig("x", moe_backend="cpu", threads=2))
    refuse_at_once(EngineConfig("x", device="interpret", moe_backend="offload"))
    monkeypatch.setattr(gpu, "DEVICE_NODES", (str(tmp_path / "none"), str(tmp_path)))
    refuse_at_once(EngineConfig("x", device="cuda", moe_backend="offload"))


def test_a_call_that_takes_too_long_is_an_error() -> None:
    assert within(5, lambda: 3, "counting") == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "dividing")
    forever = threading.Event()
    with pytest.raises(ConfigError, match=r"starting CUDA takes over 0\.1 s"):
        within(0.1, forever.wait, "starting CUDA")
    forever.set()
