"""`ft bench bw` on this machine: real kernels in its own process, the profile that it leaves, and what can go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch

from ftengine.errors import ConfigError, FtError
from ftengine.experts import profile
from ftengine.formats.format import FORMATS, ExpertLayout
from ftengine.kernels import native
from ftlaunch.bench import bandwidth
from ftlaunch.bench.bandwidth import Asked, Expert, experts_of
from ftlaunch.cli import main
from tests.models import tiny
from tests.support import pinned_copy

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="the native library is not built")
SMALL = Expert(512, 256, "nvfp4", "nvfp4")
Bench = Callable[..., dict]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write("qwen3", tmp_path / "qwen3")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def bench(ft_home: Path, alone: None, capsys: pytest.CaptureFixture[str]) -> Bench:
    def run(*arguments: str) -> dict:
        assert main(["bench", "bw", "--json", *arguments]) == 0
        said = capsys.readouterr()
        return {**json.loads(said.out), "said": said.err}

    return run


def test_what_is_measured_is_kept_and_found_again(bench: Bench, ft_home: Path, model: Path) -> None:
    """Beside what another machine has left, which is not used; and that is said."""
    layout = experts_of(str(model), ()).layouts[0]
    key = profile.Key("Other", "1.0", "Other CPU", "avx2", 3, layout.gate_up, layout.down, layout.hidden, 48, "float32")
    times = profile.LaneTimes({1: 30.0}, 10.0, 20.0)
    profile.write(ft_home / "cache", profile.LaneProfile(key, "2026-01-31", 100, 6.0, times))

    while (first := bench("--model", str(model), "--threads", "1"))["lanes"][0]["not_kept"]:
        pass  # where other programs compute so much that no line goes through these few microseconds
    assert "profile.json holds is of another GPU, driver, CPU" in first["said"]
    (lane,) = first["lanes"]
    assert lane["measured_now"] is True
    assert (lane["link"], lane["ratio"], lane["rule"]["recommended"]) == (None, None, None)
    assert "no NVIDIA driver" in first["link_missing"] or "no GPU" in first["link_missing"]
    assert first["link_missing"] in " ".join(first["said"].split())
    assert sorted(lane["cpu"]["us"]) == ["1", "2", "4", "8"]
    assert (lane["key"]["gpu"], lane["key"]["driver"], lane["key"]["threads"]) == ("none", "none", 1)
    assert lane["cpu_bytes_per_second"] == pytest.approx(lane["expert_bytes"] / lane["cpu"]["b_us"] * 1e6)
    mine, other = json.loads((ft_home / "cache" / "profile.json").read_text())["lanes"]
    assert mine == {name: lane[name] for name in profile.LaneProfile.__struct_fields__}
    assert other["key"]["gpu"] == "Other"

    again = bench("--model", str(model), "--threads", "1")
    assert again["lanes"][0] == {**lane, "measured_now": False}


def test_what_lies_on_no_line_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Times of a busy machine, the line through which is 0.0 + 960.0 n; what a file has of such is measured anew."""
    from ftengine.bench import lanes
    from ftlaunch.bench import bandwidth_lanes

    layout = ExpertLayout(512, 256, FORMATS["nvfp4"], FORMATS["nvfp4"])
    key = lanes.Setting.of(layout, "cpu", 1).key

    def made(us: dict[int, float]) -> profile.LaneProfile:
        times = profile.LaneTimes.through(us)
        return profile.LaneProfile(key, "2026-01-31", layout.used_bytes, 6.0, times, read_bytes_per_second=1e10)

    busy, quiet = made({1: 198.0, 2: 1258.0, 4: 4039.0, 8: 7841.0}), made({1: 110.0, 2: 150.0, 4: 280.0, 8: 540.0})
    assert (round(busy.cpu.a_us, 1), round(busy.cpu.b_us, 1)) == (0.0, 960.0)
    found = iter([busy, quiet])
    monkeypatch.setattr(lanes, "measure", lambda setting, show: (next(found), ""))

    def measured(fresh: bool = False) -> bandwidth.Result:
        return bandwidth_lanes.measured(layout, "cpu", 1, tmp_path, fresh, lambda stage, fraction: None)

    first = measured(fresh=True)
    assert first.kept == "1 expert took 198 us on the CPU, where the line through all says 960"
    assert f"{first.kept}; measure again when the machine is quiet" in caplog.text
    assert profile.read(tmp_path, key) is None
    profile.write(tmp_path, busy)
    caplog.set_level("INFO", "ftengine.profile")
    assert measured() == bandwidth.Result(quiet, True)
    assert f"holds lies on no line: {first.kept}: measuring anew" in caplog.text
    assert profile.read(tmp_path, key) == quiet


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen3.5"])
def test_the_key_is_that_of_the_banks_that_the_engine_loads(kind: str, tmp_path: Path, device: str) -> None:
    """So that the engine's start finds what was measured. Of "qwen3" the second layer has no experts."""
    from ftengine.experts.profile_key import Key
    from tests.gpu import models

    folder = models.write(kind, tmp_path / kind)
    banks = models.load_gpu(folder, device).banks
    asked = Asked(experts_of(str(folder), ()).layouts, "cpu")
    first = banks[min(banks)].layout
    assert asked.layout(0) == first
    assert Key.of(asked.layout(0), 3, torch.bfloat16, device) == Key.of(first, 3, torch.bfloat16, device)


def test_both_lanes(device: str) -> None:
    """In Triton's interpreter, or on a GPU: every number of experts, alone and together, and what follows from them."""
    from ftengine.bench.lanes import Setting, measure_both
    from ftengine.bench.layer import random_bank

    layout = ExpertLayout(32, 16, FORMATS["nvfp4"], FORMATS["nvfp4"])
    done: list[float] = []
    setting = Setting(layout, device, 1, torch.float32)
    found, refused = measure_both(random_bank(layout, 256), setting, done.append)
    assert found.key == setting.key
    if refused:
        pytest.skip(refused)
    assert done == sorted(done)
    assert done[-1] == 1.0
    lanes = (found.link, found.cpu, found.link_beside, found.cpu_beside)
    assert all(lane is not None and list(lane.us) == [1, 2, 4, 8] for lane in lanes)
    link, both = found.bandwidth(found.link), found.bandwidth(found.link_beside, found.cpu_beside)
    if link is not None and both is not None:  # the published rule's q* = m B_P / B_H, no more than m
        shares = [m * min(1.0, link / both) for m in profile.MISSES]
        assert found.q == pytest.approx(shares, rel=0.01, abs=0.01)


def test_which_experts_are_meant(ft_home: Path, model: Path) -> None:
    """A model's, in other formats if asked for; of the store's models one that has experts; else a well-known shape."""
    assert experts_of(None, ()) == bandwidth.Experts("Qwen3.6-35B-A3B", [Expert(2048, 512, "nvfp4", "nvfp4")])
    shutil.copytree(model, ft_home / "models" / "mine")
    (ft_home / "models" / "broken").mkdir()
    (ft_home / "models" / "broken" / "config.json").write_text("{")
    found = experts_of(None, ("nvfp4", "bf16", "nvfp4"))
    assert found.whose == "mine"
    assert found.layouts == [Expert(64, 48, "nvfp4", "nvfp4"), Expert(64, 48, "bf16", "bf16")]


def test_a_model_that_cannot_be_read(tmp_path: Path, model: Path, ft_home: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(FtError):
        experts_of(str(model), ())


def silent(stage: str, fraction: float) -> None:
    pass


def test_what_hangs_is_ended(ft_home: Path, alone: None) -> None:
    """A process that is stopped says nothing more, as one inside a driver's call."""

    def stop() -> None:
        child = started(os.getpid())
        child.send_signal(signal.SIGSTOP)
        stopped.append(child)

    stopped: list[psutil.Process] = []
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(FtError, match="no news for 1 s while: "):
        bandwidth.measure(Asked([SMALL], "cpu"), silent, print, patience=1.0)
    thread.join()
    gone(stopped[0])


def test_what_dies_is_told(ft_home: Path, alone: None) -> None:
    """As a process that the system ends for want of memory."""
    thread = threading.Thread(target=lambda: started(os.getpid()).kill())
    thread.start()
    with pytest.raises(FtError, match="ended with status -9"):
        bandwidth.measure(Asked([SMALL], "cpu"), silent, print)
    thread.join()


def test_ctrl_c_leaves_nothing_running(ft_home: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [sys.executable, "-m", "ftlaunch", "bench", "bw"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as command:
        child = started(command.pid)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    gone(child)
    assert not (ft_home / "cache").exists()


def started(parent: int) -> psutil.Process:
    """The measuring process, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(parent).children():
            try:
                if "ftlaunch.bench.bandwidth_child" in child.cmdline():
                    return child
            except psutil.Error:
                continue
        time.sleep(0.01)
    raise AssertionError("nothing measures")


def gone(process: psutil.Process) -> None:
    try:
        process.wait(60)
    except psutil.NoSuchProcess:
        pass
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_cache_folder_that_cannot_be_written(bench: Bench, ft_home: Path, model: Path) -> None:
    """What was measured is shown all the same."""
    ft_home.mkdir()
    (ft_home / "cache").touch()
    found = bench("--model", str(model))
    assert found["lanes"][0]["not_kept"]
    assert "ft serve will measure again" in found["said"]
    assert found["said"].count("not kept") == 2  # why, and what follows: each once


def test_two_at_once_take_turns(bench: Bench, ft_home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take the other's part of the memory's bandwidth."""
    from ftengine.locks import locked

    held, waits, done = threading.Event(), threading.Event(), threading.Event()

    def telling(path: Path, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        return locked(path, lambda: (on_wait(), waits.set()))

    def other() -> None:
        with locked(ft_home / "run" / "bench-bw.lock"):
            held.set()
            assert waits.wait(60)
            assert not done.wait(1.0)
            measured.append((ft_home / "cache" / "profile.json").exists())

    measured: list[bool] = []
    thread = threading.Thread(target=other)
    thread.start()
    held.wait(60)
    monkeypatch.setattr(bandwidth, "locked", telling)
    found = bench("--model", str(model))
    done.set()
    thread.join()
    assert measured == [False]
    assert "Another ft bench bw measures: waiting." in found["said"]


def test_more_threads_than_there_are_cpus(bench: Bench, model: Path) -> None:
    found = bench("--model", str(model), "--threads", "1024")
    used = found["lanes"][0]["key"]["threads"]
    assert used == native.granted_threads() < 1024
    assert f"Of 1024 threads {used} computed" in found["said"]


def test_kernels_that_do_not_run_here(ft_home: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_ISA", "sve2")
    with pytest.raises(FtError, match="FT_ISA=sve2 cannot be executed") as raised:
        bandwidth.measure(Asked([SMALL], "cpu"), silent, print)
    assert "unset FT_ISA" in raised.value.next_step


def test_without_torch(ft_home: Path, tmp_path: Path) -> None:
    """The command itself needs none; who measures says what is missing."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ftlaunch", "bench", "bw", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Error: the Python package torch is missing or broken\nTry:   pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "sentence", "step"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
            "memory is free on the GPU",
            "ft doctor",
        ),
        (RuntimeError("CUDA error: out of memory"), "memory is free on the GPU", "ft doctor"),
        (
            RuntimeError("the GPU waited in vain\nfor long"),
            "cannot be measured: RuntimeError: the GPU waited in vain",
            "ft",
        ),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object", name="_C"),
            "PyTorch cannot be loaded: libtorch_cpu.so: failed to map segment",
            "ft doctor",
        ),
        (MemoryError(), "this machine has not enough free memory", "close other programs"),
        (ConfigError("no", "ft list"), "no", "ft list"),
    ],
)
def test_what_goes_wrong_there_is_one_sentence_and_the_next_command(error: Exception, sentence: str, step: str) -> None:
    from ftlaunch.bench.bandwidth_child import _failure

    failed = _failure(error)
    assert sentence in failed.sentence
    assert "\n" not in failed.sentence
    assert step in failed.next_step


@pytest.mark.parametrize(("free", "experts"), [(2 << 30, 512), (256 << 20, 128), (100 << 20, 50)])
def test_memory_is_bounded(free: int, experts: int) -> None:
    """Half of what is free, and no more than is of use: 1 MiB an expert, a cache of 8 MiB."""
    from ftengine.bench.lanes import experts_for

    layout = ExpertLayout(1024, 160, FORMATS["bf16"], FORMATS["bf16"])
    assert layout.block_bytes <= 1 << 20
    found = experts_for(layout, free, "of a test", cache=8 << 20)
    assert found == pytest.approx(experts * (1 << 20) / layout.block_bytes, rel=0.02)
    assert found * layout.block_bytes <= free / 2
    assert experts_for(layout, 1 << 40, "of a test", cache=1 << 30) * layout.block_bytes > 4 * ((1 << 30) - (1 << 20))


def test_no_room() -> None:
    from ftengine.bench.lanes import experts_for

    layout = ExpertLayout(6144, 2048, FORMATS["bf16"], FORMATS["bf16"])
    with pytest.raises(ConfigError, match=r"of 75\.50 MB needs 0\.28 GiB of free memory, 0\.10 GiB"):
        experts_for(layout, 100 << 20, "of a test", cache=1 << 20)
    with pytest.raises(ConfigError, match=r"needs 4\.00 GiB of free memory, 2\.00 GiB are there \(of a test\)"):
        experts_for(layout, 2 << 30, "of a test", cache=1 << 30)  # what is read would lie in the cache


@pytest.mark.slow
def test_reading_and_computing_against_other_measurements(bench: Bench, tmp_path: Path) -> None:
    """Within 10 %: memory against a program of its own in C, in the manner of STREAM; eight experts against another
    harness, `ft bench cpu`'s. The best of turns, because this wants a quiet machine.
    """
    from ftengine.bench.layer import Bank, Shape

    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    program, threads = tmp_path / "stream_read", native.granted_threads()
    source = Path(__file__).parents[1] / "machine" / "stream_read.c"
    subprocess.run([compiler, "-O3", "-march=native", "-pthread", "-o", program, source], check=True)
    bank, shape = Bank(Shape(), FORMATS["nvfp4"]), Shape()
    dtype = torch.float32
    ours, theirs, layers, others = [], [], [], []
    for _ in range(3):
        found = bench("--fresh", "--dtype", "nvfp4")["lanes"][0]
        dtype = getattr(torch, found["key"]["activations"])
        ours.append(found["read_bytes_per_second"])
        layers.append(found["cpu"]["us"][str(shape.top_k)])
        told = subprocess.run([program, str(1 << 30), str(threads)], capture_output=True, text=True, check=True)
        theirs.append(float(told.stdout))
        others.append(bank.time(1, threads, dtype).milliseconds * 1e3)
    assert max(ours) == pytest.approx(max(theirs), rel=0.1)
    assert min(layers) == pytest.approx(min(others), rel=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_link_against_a_pinned_copy(ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 10 % of torch's own copy of another size, timed on the host."""
    assert main(["bench", "bw", "--json", "--dtype", "nvfp4"]) == 0
    (lane,) = json.loads(capsys.readouterr().out)["lanes"]
    best = pinned_copy.bytes_per_second()
    assert lane["copy_bytes_per_second"] == pytest.approx(best, rel=0.1)
    assert lane["link_bytes_per_second"] == pytest.approx(best, rel=0.1)
