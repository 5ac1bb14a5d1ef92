"""Experts that the GPU cannot read by itself, because pinning was refused; and copies of them that do not arrive.

The other side is the CPU's engine in float32. FT_PIN=0 stands for a system that refuses; how such a refusal is taken
and explained is in tests/experts/test_pinned.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine import wire
from ftengine.config import EngineConfig
from ftengine.errors import ConfigError, FtError
from ftengine.experts.pinned import PinLimits
from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.scheduler import lanes
from ftengine.scheduler.start_gpu import check_pinning
from tests.gpu import models
from tests.gpu.test_start import CONFIG, PROMPTS
from tests.models import driver
from tests.scheduler.spawn import EngineProcess, tokens

GIB = 1 << 30
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("qwen3.5", tmp_path_factory.mktemp("unpinned") / "model")


@pytest.fixture
def model(folder: Path, device: str) -> Iterator[GpuDecoder]:
    made = models.load_gpu(folder, device)
    yield made
    made.close()


@pytest.mark.parametrize(("strategy", "slots"), [("hybrid", 4), pytest.param("cpu", 0, marks=pytest.mark.slow)])
def test_prompts_cross_the_link_by_copies_and_the_cpu_computes_what_has_no_slot(
    strategy: str, slots: int, folder: Path, model: GpuDecoder
) -> None:
    """Against transformers: a prompt in two chunks, then tokens one by one."""
    model.prepare(models.setup(strategy, slots=slots, staging=4, max_running=2, readable=False))
    (found,) = models.logits_of(models.start(model), [models.prompt_of(9, 1)], 5, 2)
    expected = driver.reference_logits(driver.load_reference(folder), models.prompt_of(9, 1))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    counts = model.experts.stats()
    assert counts is not None
    assert counts.total.fetched == counts.total.admitted == 0
    assert counts.total.cpu_experts == counts.total.misses > 0


@pytest.mark.slow
def test_the_server_starts_says_so_and_answers_as_on_the_cpu(
    folder: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FT_PIN", "0")
    found, logs = {}, {}
    for name, settings in {"cpu": {}, "interpret" if device == "cpu" else device: {"moe_cache_size": 5}}.items():
        with EngineProcess(folder, plugins="", device=name, **CONFIG, **settings) as engine:
            engine.socket.settimeout(240)
            facts = engine.start().facts
            for prompt, ids in PROMPTS.items():
                engine.submit(prompt, ids, 3)
            found[name] = {prompt: tokens(said) for prompt, said in engine.collect(*PROMPTS).items()}
            counted = engine.stats()["experts"]
            engine.send(wire.Shutdown())
            engine.wait(30)
            logs[name] = engine.process.stderr.read()
    cpu, ours = found.values()
    assert ours == cpu
    assert facts["moe_pinned"] == {"value": False, "reason": "FT_PIN=0 is set"}
    assert facts["moe_backend"]["value"] == "hybrid"
    assert "not pinned" in facts["moe_backend"]["reason"]
    assert "experts are not pinned, so the GPU cannot read them by itself: FT_PIN=0 is set; the CPU" in logs[name]
    assert counted["total"]["fetched"] == 0


def test_the_switch_that_stands_for_a_refusal(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("FT_PIN", "0")
    pinned = lanes.pin_banks({}, torch.device(device)).outcome
    assert (pinned.value, pinned.reason) == (False, "FT_PIN=0 is set")


WSL = PinLimits(memlock=None, wsl=True, total=16 * GIB)


def test_what_windows_will_hardly_pin_is_said_before_anything_is_read(caplog: pytest.LogCaptureFixture) -> None:
    check_pinning(EngineConfig("x"), 8 * GIB, WSL)
    check_pinning(EngineConfig("x", moe_backend="offload"), 30 * GIB, PinLimits(8 << 20, False, 16 * GIB))
    assert not caplog.text
    check_pinning(EngineConfig("x"), 9 * GIB, WSL)
    said = "pinning 9.00 GiB of experts will probably be refused; under WSL 2 Windows pins no more than about half"
    assert said in caplog.text
    with pytest.raises(ConfigError, match=r"offload needs 9\.00 GiB of pinned memory; under .* 8\.00 GiB here") as told:
        check_pinning(EngineConfig("x", moe_backend="offload"), 9 * GIB, WSL)
    assert told.value.next_step == "ft serve --moe-backend auto"


@pytest.mark.parametrize("damage", ["nothing is copied", "one word is wrong"])
def test_a_copy_of_experts_that_does_not_arrive_is_found_at_load(
    damage: str, model: GpuDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SlotPool.load_layer

    def damaged(pool: SlotPool, index: int, bank: ExpertBank) -> None:
        slots = pool.tensors.blocks[index * pool.experts : (index + 1) * pool.experts]
        slots.zero_()  # what lay there before
        if index == 0 or damage != "nothing is copied":
            load(pool, index, bank)
        if index == 1 and damage == "one word is wrong":
            slots[3, 0] ^= 1

    monkeypatch.setattr(SlotPool, "load_layer", damaged)
    with pytest.raises(FtError, match=r"^\d+ of \d+ sampled words of experts are wrong .* in MoE layer 1$") as told:
        model.prepare(models.setup("resident"))
    assert told.value.next_step == "ft serve --device cpu"
