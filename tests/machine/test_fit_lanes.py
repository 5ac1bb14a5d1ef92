"""Which measurement in profile.json `ft doctor --model` and its like go by: the engine's own, or none, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.experts import profile, profile_key
from ftengine.experts.profile_key import Key
from ftlaunch.machine import lanes, memory_read, model
from ftlaunch.machine.fit import Model, Room, read
from ftlaunch.machine.probe import Asked
from tests.machine.test_fit import GIB, KNOWN

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 00:00:00 UTC 2025\n"
ROOM = Room(16 * GIB, "of a test", 7 * GIB, "Fake 4060")
OWN = {**KNOWN, "gpu.lanes": {}}  # the doctor has measured no lanes itself
Made = Callable[..., profile.LaneProfile]


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Model:
    return read(demo_model)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a machine with eight CPUs, a Fake 4060 and driver 580.65.06."""
    monkeypatch.setattr(model, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(model.native, "granted_threads", lambda: 8)
    monkeypatch.setattr(model, "choose_kernels", lambda: Resolved("avx2", "of a test"))
    monkeypatch.setattr(profile_key, "_driver_text", lambda: DRIVER)
    monkeypatch.setattr(model, "torch_cuda", lambda: "12.8")
    return tmp_path


@pytest.fixture
def made(demo: Model, folder: Path) -> Made:
    """Writes a measurement of this machine, or with one field of its key changed."""
    layout = demo.layout
    assert layout is not None
    formats, shape = (layout.gate_up.name, layout.down.name), (layout.hidden, layout.intermediate)
    here = Key("Fake 4060, 8192 MiB", "580.65.06", "Fake 9000", "avx2", 7, *formats, *shape, "bfloat16")

    def write(**changes: str | int) -> profile.LaneProfile:
        us = [profile.LaneTimes({1: a + b, 2: a + 2 * b}, a, b) for a, b in ((9, 20), (3, 40), (10, 31), (4, 44))]
        key = msgspec.structs.replace(here, **changes)
        found = profile.LaneProfile(key, "2026-01-31", 1000, 6.0, us[0], us[1], us[2], us[3])
        profile.write(folder, found)
        return found

    return write


def test_lanes_that_the_engine_measured_before(demo: Model, made: Made) -> None:
    """As it would choose a strategy by them; with other threads they are none."""
    from ftengine.scheduler.lanes import lanes_of

    assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7) == (None, "")
    mine = made()
    assert model.lanes_here(demo, ROOM, Asked(known=KNOWN), 7) == (lanes_of(mine), "")
    assert model.known_lanes(demo, ROOM, Asked(known=KNOWN), 7) == lanes_of(mine)
    few = model.lanes_here(demo, ROOM, Asked(known=OWN), 4)
    assert few == (None, "is of another number of threads")
    made(threads=8)
    assert model.known_lanes(demo, ROOM, Asked(known=OWN), 64) is not None, "more than there are CPUs"


OTHERS = [
    ({"gpu": "Another, 8192 MiB"}, "GPU"),
    ({"gpu": "Fake 4060 Ti, 8192 MiB"}, "GPU"),
    ({"gpu": "Fake 4060, 16384 MiB"}, "GPU"),
    ({"gpu": "none", "driver": "none"}, "GPU, driver"),
    ({"driver": "570.86.10"}, "driver"),
    ({"cpu": "Fake 7000"}, "CPU"),
    ({"kernels": "amx"}, "kernels"),
    ({"gate_up": "nvfp4", "down": "nvfp4"}, "format"),
    ({"hidden": 4096}, "shape"),
    ({"intermediate": 4096}, "shape"),
    ({"activations": "float32"}, "dtype of activations"),
]


@pytest.mark.parametrize(("changes", "words"), OTHERS)
def test_what_is_of_another_machine_is_not_taken(
    changes: dict[str, str | int], words: str, demo: Model, made: Made
) -> None:
    """The doctor's own figures are, and it says which fields differ."""
    made(**changes)
    found, aside = model.lanes_here(demo, ROOM, Asked(known=KNOWN), 7)
    assert found == lanes.measured(KNOWN, demo.sizes.block, 7)
    assert aside == f"is of another {words}"
    made()
    assert model.lanes_here(demo, ROOM, Asked(known=KNOWN), 7)[1] == ""


def test_the_engine_and_the_doctor_agree(
    demo: Model, made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PyTorch tells of this machine, as a start has it, against what the probes told."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("ftengine._native")
    properties = SimpleNamespace(name="Fake 4060", total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(profile_key, "cpu_name", lambda: "Fake 9000")
    monkeypatch.setattr(profile_key.native, "kernel_choice", lambda: ("avx2", "of a test"))
    assert demo.layout is not None
    key = Key.of(demo.layout, 7, torch.bfloat16, "cuda")
    mine = made(**msgspec.structs.asdict(key))
    assert profile.read(folder, key) == mine
    assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7)[0] is not None
    monkeypatch.setattr(profile_key, "_driver_text", lambda: "")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert profile.read(folder, Key.of(demo.layout, 7, torch.bfloat16, "cuda")) is None
    assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7) == (None, "is of another driver")
    made(driver="CUDA 12.8")
    assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7)[0] is not None


def test_what_cannot_be_known_is_not_compared(demo: Model, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library counts memory otherwise than CUDA; kernels that do not run here are refused at a start."""

    def refuses() -> Resolved[str]:
        raise ConfigError("FT_ISA=sve2 cannot be executed by this processor", "unset FT_ISA")

    made(gpu="Fake 4060, 6144 MiB")
    assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7) == (None, "is of another GPU")
    assert model.lanes_here(demo, ROOM, Asked(known=OWN, quick=True), 7)[0] is not None
    made(driver="CUDA 11.8", kernels="amx", cpu="Fake 7000")
    made(gpu="Another")
    monkeypatch.setattr(profile_key, "_driver_text", lambda: "")
    monkeypatch.setattr(model, "torch_cuda", lambda: None)
    monkeypatch.setattr(model, "choose_kernels", refuses)
    unknown = {name: data for name, data in OWN.items() if name != "cpu.processor"}
    assert model.lanes_here(demo, ROOM, Asked(known=unknown), 7)[0] is not None


def test_activations_are_those_that_are_asked_for(demo_model: Path, made: Made) -> None:
    made(activations="float32")
    assert model.lanes_here(read(demo_model, "float32"), ROOM, Asked(known=OWN), 7)[0] is not None


def test_lines_that_miss_their_points_are_not_taken(demo: Model, made: Made, folder: Path) -> None:
    mine = made()
    times = profile.LaneTimes({1: 200.0, 2: 50.0}, 10.0, 20.0)
    profile.write(folder, msgspec.structs.replace(mine, cpu=times))
    found, aside = model.lanes_here(demo, ROOM, Asked(known=OWN), 7)
    assert found is None
    assert aside == "lies on no line: 1 expert took 200 us on the CPU, where the line through all says 30"


def test_a_measurement_without_the_link(demo: Model, made: Made, folder: Path) -> None:
    alone = msgspec.structs.replace(made(), link=None, link_beside=None, cpu_beside=None)
    profile.write(folder, alone)
    aside = "was measured where the GPU could not read the experts"
    assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7) == (None, aside)


def test_a_damaged_file_tells_nothing(demo: Model, folder: Path) -> None:
    for content in ('{"version": 1, "lanes": [7, {"key": {}}, null]}', '{"version": 1', '{"version": 2, "lanes": []}'):
        (folder / "profile.json").write_text(content)
        assert model.lanes_here(demo, ROOM, Asked(known=OWN), 7) == (None, "")


def test_it_is_said_where_it_matters(
    demo_model: Path, demo: Model, made: Made, folder: Path, ft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the strategy, unless all experts fit; also where costs follow from bandwidths alone."""
    monkeypatch.setattr(memory_read, "short", lambda threads=None: 1e10 * (threads or 4))
    threads = min(8, model.lane_threads(EngineConfig("x")).value)

    def told(**changes: float) -> model.Finding:
        config = EngineConfig(str(demo_model), **changes).to_json()
        known = {**OWN, "gpu.link": {"best_bytes_per_second": 31.5e9}}
        found = model.probe(Asked(model=str(demo_model), config=config, known=known))
        return next(each for each in found if each.id == "model.strategy")

    made(driver="570.86.10", threads=threads)
    rough = "; by bandwidths, the lanes were not measured with its experts"
    aside = f"{rough}; what profile.json holds is of another driver"
    assert told(moe_cache_rate=0.25).value.endswith(aside)
    assert told(moe_cache_rate=0.25).data["reason"].endswith(aside)
    assert "profile.json" not in told().value, "all of them fit"
    made(threads=threads)
    value = told(moe_cache_rate=0.25).value
    assert "profile.json" not in value
    assert "by bandwidths" not in value
    (folder / "profile.json").unlink()
    assert told(moe_cache_rate=0.25).value.endswith(rough)
