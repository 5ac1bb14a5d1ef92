"""Whether a model fits: against the engine's own demand, start and lanes; and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ftengine import wire
from ftengine.config import Resolved
from ftengine.memory.machine import available_memory
from ftlaunch.machine import lanes, model
from ftlaunch.machine.fit import Model, Room, fit, read
from tests.scheduler.spawn import EngineProcess

GIB = 1 << 30
KNOWN = {  # as `ft doctor` finds it on a machine with a GPU
    "gpu.use": {"usable": True, "name": "Fake 4060", "total": 8 * GIB, "free": 7 * GIB},
    "gpu.gather": {"bytes_per_second": 12e9},
    "gpu.lanes": {"cpu_bytes_per_second": 30e9, "together_bytes_per_second": 35e9, "handshake_us": 7.0},
    "cpu.processor": {"name": "Fake 9000"},
}


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Model:
    return read(demo_model)


def test_on_the_cpu_it_is_what_the_engine_then_says(demo_model: Path, demo: Model) -> None:
    """Context, and memory: what the process really holds is at most what was said."""
    memory, bound = available_memory()
    told = fit(demo, Room(memory, bound))
    with EngineProcess(demo_model, plugins="", device="cpu") as engine:
        engine.socket.settimeout(120)
        ready = engine.start()
        assert isinstance(ready, wire.Ready)
        held = psutil.Process(engine.process.pid).memory_info().rss
    assert told.fits
    assert (told.device, told.context) == ("cpu", ready.context_length)
    assert demo.sizes.dense + demo.sizes.banks < held < told.memory


def test_the_demand_is_the_engines(demo_model: Path, demo: Model) -> None:
    """What the start on a GPU divides its memory by; what it makes of it is the same function here."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    from ftengine.config import EngineConfig
    from ftengine.memory import estimate
    from ftengine.scheduler.beginning import Beginning
    from ftengine.scheduler.start_gpu import demand_of
    from ftengine.scheduler.timeline import Timeline
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.open import open_source

    checkpoint = Checkpoint.open(demo_model)
    with open_source(checkpoint) as source:
        sizes = estimate.weight_sizes(source, checkpoint.text_config)
        two, bfloat16 = Resolved(2, "asked for"), Resolved("bfloat16", "default on a GPU")
        config = EngineConfig(str(demo_model))
        begin = Beginning(config, checkpoint, source, sizes, two, bfloat16, lambda stage, done: None, Timeline())
        assert demo.demand == demand_of(begin)


CASES = [
    # RAM, VRAM, pin limit in GiB; fits, device, strategy
    (16, 7, None, True, "cuda", "resident"),
    (16, 0.9, None, True, "cuda", "hybrid"),
    (16, 0.9, 0.1, True, "cuda", "hybrid"),
    (16, 0.1, None, True, "cpu", None),
    (16, 0, None, True, "cpu", None),
    (0.5, 7, None, False, "cuda", None),
    (0.5, 0, None, False, "cpu", None),
]


@pytest.mark.parametrize(("ram", "vram", "pin", "fits", "device", "strategy"), CASES)
def test_machines(
    demo: Model, ram: float, vram: float, pin: float | None, fits: bool, device: str, strategy: str | None
) -> None:
    room = Room(int(ram * GIB), "of a test", int(vram * GIB), "Fake 4060", None if pin is None else int(pin * GIB))
    told = fit(demo, room)
    assert (told.fits, told.device) == (fits, device)
    assert (told.strategy.strategy if told.strategy else None) == strategy
    found = {finding.id: finding for finding in model.findings(demo, room, told)}
    assert found["model.memory"].verdict == ("ok" if fits else "bad")
    if not fits:
        assert "0.50 GiB" in told.reason
        assert set(found) == {"model.memory"}
    elif device == "cuda":
        assert told.vram <= room.vram
        assert told.slots == (120 if strategy == "resident" else found["model.vram"].data["slots"])
        assert sum(found["model.vram"].data["parts"].values()) == told.vram
        assert found["model.pinned"].verdict == ("warn" if pin else "ok")
        assert told.pinned == demo.sizes.banks
    elif vram:
        assert found["model.vram"].verdict == "warn"
        assert "Fake 4060" in found["model.vram"].value


def test_an_architecture_that_is_not_served(demo: Model) -> None:
    other = Model(**{**vars(demo), "architecture": "OtherForCausalLM"})
    told = fit(other, Room(16 * GIB, "of a test"))
    assert told.reason == "the architecture OtherForCausalLM is not served"


def test_lanes_from_the_doctors_own_figures(demo: Model) -> None:
    """Both lanes at once move what was measured of both at once."""
    found = lanes.measured(KNOWN, demo.sizes.block, 7)
    assert found is not None
    assert demo.sizes.block / found.alone.b_link * 1e6 == pytest.approx(12e9)
    rates = [demo.sizes.block / us * 1e6 for us in (found.together.b_link, found.together.b_cpu)]
    assert sum(rates) == pytest.approx(35e9)
    told = fit(demo, Room(16 * GIB, "of a test", int(0.9 * GIB), "Fake 4060"), found)
    assert told.strategy is not None
    assert set(told.strategy.predicted) == {"offload", "cpu", "hybrid"}
    assert told.strategy.strategy == min(told.strategy.predicted, key=lambda name: told.strategy.predicted[name])
