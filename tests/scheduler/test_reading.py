"""What a start reads while torch is imported, and when it leaves that alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftengine import wire
from ftengine.config import EngineConfig, Resolved
from ftengine.errors import CheckpointError, ConfigError
from ftengine.memory import estimate
from ftengine.memory.gpu import Gpu, NoGpu
from ftengine.memory.plan import usable
from ftengine.memory.sizes import GIB
from ftengine.scheduler import beginning, reading, start_cpu
from ftengine.scheduler import start as starting
from ftengine.scheduler.reading import IMPORT_BYTES, read_ahead, short_turns
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw import files as ftw_files
from ftengine.weights.ftw.files import FtwFiles
from ftengine.weights.ftw.layout import Origin
from tests.scheduler.spawn import ROOT, EngineProcess
from tests.weights import checkpoints
from tests.weights.conventions import CONVENTIONS

GPU = Gpu("a GPU", (9, 0), 80 * GIB, 80 * GIB, 13000, 1)
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model of two layers with experts as safetensors, and as FTW."""
    source = tmp_path_factory.mktemp("reading") / "source"
    checkpoints.write(source, CONVENTIONS["modelopt-nvfp4"])
    convert(source, source.parent / "ftw", Options(), Origin("x"))
    return source, source.parent / "ftw"


@pytest.fixture
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[1]


@pytest.fixture
def files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FtwFiles]:
    monkeypatch.setattr(ftw_files, "SMALLEST", 1)
    with FtwFiles(folder) as opened:
        yield opened


def begun(files: FtwFiles) -> str:
    """Which sections are being read."""
    dense = {files.ahead(tensor) is not None for tensor in files.header.tensors}
    experts = {files.ahead(section) is not None for section in files.header.experts}
    return {(True, True): "all", (False, True): "experts", (False, False): "nothing"}[(*dense, *experts)]


def never() -> Gpu | NoGpu:
    raise AssertionError("the driver was waited for")


def memory_for(need: int) -> int:
    """The least available memory of which so much can be used."""
    amount = need
    while usable(amount) < need:
        amount += need - usable(amount)
    return amount


@pytest.mark.parametrize(
    ("device", "room", "gpu", "expected"),
    [
        ("cpu", "all", never, "all"),
        ("auto", "all", never, "all"),
        ("cuda", "all", never, "all"),
        ("cpu", "experts", never, "nothing"),
        ("auto", "experts", lambda: NoGpu("none"), "nothing"),
        ("auto", "experts", lambda: GPU, "experts"),
        ("interpret", "experts", lambda: GPU, "experts"),
        ("auto", "less", never, "nothing"),
        ("cuda", "less", never, "nothing"),
    ],
)
def test_as_much_as_the_checks_of_the_start_let_in(
    device: str,
    room: str,
    gpu: Callable[[], Gpu | NoGpu],
    expected: str,
    files: FtwFiles,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte: `all` is the weights and 1,024 tokens of keys and values, besides what importing torch takes."""
    checkpoint = Checkpoint.open(folder)
    sizes = estimate.weight_sizes(files, checkpoint.text_config)
    kept = 1024 * estimate.kv_bytes_per_token(checkpoint.text_config, "float32")
    assert kept > 0
    need = {"all": sizes.dense + sizes.banks + kept, "experts": sizes.banks, "less": sizes.banks - 1}[room]
    memory = IMPORT_BYTES + memory_for(need)
    monkeypatch.setattr(reading, "available_memory", lambda: (memory, "a test"))
    config = EngineConfig(str(folder), device=device, dtype="float32")
    found = read_ahead(config, checkpoint, files, gpu)
    assert begun(files) == expected
    assert found == (None if expected == "nothing" else Resolved(memory - IMPORT_BYTES, "a test"))


def test_not_where_address_space_is_limited(files: FtwFiles, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = {resource.RLIMIT_AS: (1 << 40, resource.RLIM_INFINITY)}
    without = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, without))
    assert read_ahead(EngineConfig(str(folder)), Checkpoint.open(folder), files, never) is None
    assert begun(files) == "nothing"
    limits.clear()
    assert read_ahead(EngineConfig(str(folder)), Checkpoint.open(folder), files, never) is not None


@pytest.mark.parametrize("changes", [{"num_experts": 4}, {"num_hidden_layers": "2"}, {"num_hidden_layers": 1000}])
def test_not_where_the_configuration_says_otherwise(changes: dict, files: FtwFiles, folder: Path) -> None:
    """Loading refuses that; what is begun must be what the memory was checked for."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.text_config.update(changes)
    expected = "all" if changes == {"num_hidden_layers": 1000} else "nothing"
    read_ahead(EngineConfig(str(folder), device="cpu"), checkpoint, files, never)
    assert begun(files) == expected


def test_not_where_tensors_are_named_as_experts_are(files: FtwFiles, folder: Path) -> None:
    """No sum counts those; the loading says that they have no place."""
    name = "layers.0.mlp.experts.0.gate_proj.weight"
    first, *others = files.header.tensors
    tensors = (msgspec.structs.replace(first, name=name), *others)
    files.header = msgspec.structs.replace(files.header, tensors=tensors)
    assert read_ahead(EngineConfig(str(folder), device="cpu"), Checkpoint.open(folder), files, never) is None
    assert begun(files) == "nothing"


def test_not_for_architectures_of_plugins(files: FtwFiles, folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.architecture = "OfAPlugin"
    assert read_ahead(EngineConfig(str(folder), device="cpu"), checkpoint, files, never) is None


def test_turns_are_short_for_as_long_as_they_are_needed() -> None:
    before = sys.getswitchinterval()
    with short_turns():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == pytest.approx(before)


BEFORE_TORCH = """
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from ftengine.config import EngineConfig
from ftengine.scheduler import start as starting
from ftengine.weights.ftw import files as ftw_files
from ftengine.weights.ranges import RangeReader

ftw_files.SMALLEST = 1
opened, again = [], []
real = starting.open_files
starting.open_files = lambda checkpoint: opened.append(real(checkpoint)) or opened[-1]

class UntilItIsRead(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            header = opened[0].header
            whole = sum(section.extent for section in (*header.tensors, *header.experts))
            while opened[0].bytes_ahead() < whole:
                pass
            print("read before torch")
            execute(module)

        spec.loader.exec_module = exec_module
        return spec

assert "torch" not in sys.modules
sys.meta_path.insert(0, UntilItIsRead())
RangeReader.read = lambda *arguments: again.append(arguments)
stages = []
engine, ready = starting.start(EngineConfig.from_json(sys.argv[1]), lambda stage, done: stages.append(done))
assert stages == sorted(stages)
print("ready,", len(again), "read again")
"""


def test_everything_can_be_read_before_torch_is_imported_and_nothing_is_read_twice(folder: Path) -> None:
    """The import of torch waits until all is read: for ever, if reading began later."""
    config = EngineConfig(str(folder), device="cpu", threads=1, context=64).to_json()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH, config],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "read before torch\nready, 0 read again\n", done.stderr


def test_the_process_answers_as_with_weights_that_are_not_read_ahead(folders: tuple[Path, Path]) -> None:
    answers = []
    for one in folders:
        with EngineProcess(one, plugins="", device="cpu", dtype="float32", context=64) as engine:
            ready = engine.start()
            assert isinstance(ready, wire.Ready), ready
            done = [frame.done for frame in engine.loading]
            assert done == sorted(done)
            answers.append(engine.generate(PROMPT, 8))
            engine.send(wire.Shutdown())
            engine.wait(60)
            log = engine.process.stderr.read()
            assert ("read while PyTorch was imported" in log) == (one == folders[1])
    assert answers[0] == answers[1]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    real, sizes = os.preadv, list[int]()

    def counted(*arguments: object) -> int:
        sizes.append(real(*arguments))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_too_little_memory_is_refused_before_a_byte_is_read(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the check that every start makes."""
    for module in (reading, beginning):
        monkeypatch.setattr(module, "available_memory", lambda: (1 << 16, "memory limit of the cgroup"))
    monkeypatch.setattr(starting, "probe", lambda: NoGpu("none"))
    sizes = count_reads(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"^the weights need .* but of 0\.00 GiB available \(memory limit of the cgroup\) 0\.00 GiB"
    ):
        starting.start(EngineConfig(str(folder), device=device, threads=1), lambda stage, done: None)
    assert sizes == []


def test_memory_that_weights_have_taken_already_still_counts_as_available(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> tuple[int, str]:
        raise AssertionError("asked when reading had begun")

    monkeypatch.setattr(reading, "available_memory", lambda: (3 * GIB, "a test"))
    monkeypatch.setattr(beginning, "available_memory", again)
    config = EngineConfig(str(folder), device="cpu", threads=1, context=64)
    _, ready = starting.start(config, lambda stage, done: None)
    assert ready.facts["memory_bytes"] == {"value": 3 * GIB - IMPORT_BYTES, "reason": "a test"}


def test_a_start_that_fails_leaves_no_thread_and_no_file_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FtwFiles] = []
    real = starting.open_files

    def keep(checkpoint: Checkpoint) -> FtwFiles | None:
        opened.append(real(checkpoint))
        return opened[-1]

    def fails(*arguments: object) -> None:
        assert opened[0].ahead(opened[0].header.experts[0]) is not None, "nothing was begun"
        raise CheckpointError("it fails")

    before = ahead_threads()
    monkeypatch.setattr(starting, "open_files", keep)
    monkeypatch.setattr(start_cpu, "load", fails)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    with pytest.raises(CheckpointError, match="it fails"):
        starting.start(EngineConfig(str(folder), device="cpu", threads=1), lambda stage, done: None)
    assert ahead_threads() == before
    assert opened[0].ahead(opened[0].header.experts[0]) is None
    assert opened[0]._reader.files == []
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) == descriptors


SLOW_DISK = """
import os, sys, threading, time
from ftengine import process

real = os.preadv

def slow(*arguments):
    if threading.current_thread().name.startswith("ahead"):
        time.sleep(300)
    return real(*arguments)

os.preadv = slow
sys.exit(process.main())
"""


def test_sigterm_does_not_wait_for_a_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read takes five minutes; the process is gone long before."""
    real = subprocess.Popen

    def spawn(command: list[str], **options: object) -> subprocess.Popen:
        assert command[1:3] == ["-m", "ftengine.process"]
        return real([command[0], "-c", SLOW_DISK, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", spawn)
    with EngineProcess(folder, plugins="", device="cpu") as engine:
        while engine.receive().stage != "loading weights":
            pass
        engine.process.send_signal(signal.SIGTERM)
        engine.wait(60)
        assert engine.process.returncode == 128 + signal.SIGTERM
