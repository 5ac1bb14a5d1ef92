"""The check beside timed runs: its torch formulas against transformers, and whether it sees work that was skipped."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")
pytest.importorskip("triton", reason="there is no Triton for this system")

from ftengine.bench import gpu_check, gpu_options
from ftengine.bench.torch_reference import Reference
from ftengine.config import Resolved
from ftengine.core import CacheTensors
from ftengine.errors import FtError
from ftengine.experts.pinned import Pinned
from ftengine.experts.pool import ExpertBank
from ftengine.models.gpu import experts as gpu_experts
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.scheduler.lanes import PinnedBanks
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source
from tests.experts.test_pinned import Runtime
from tests.gpu import models
from tests.models import driver, tiny


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen3-dense-among", "qwen3.5"])
def test_the_formulas_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Every position of a prompt, whose second part goes on from what the first one left."""
    folder, prompt = tiny.write(kind, tmp_path / "model"), models.prompt_of(12)
    checkpoint = Checkpoint.open(folder)
    with open_source(checkpoint) as source, torch.no_grad():
        reference = Reference(checkpoint, source)
        residual = reference.embed(prompt)
        for index in range(reference.config.num_hidden_layers):
            layer = reference.layer(index)
            first, past = layer.mix(residual[:7], None, None)
            residual = residual + torch.cat((first, layer.mix(residual[7:], past, None)[0]))
            residual = residual + layer.feed(residual, None)
        found = reference.logits(residual, None)
    expected = driver.reference_logits(driver.load_reference(folder), prompt)
    assert expected.std() > 0.2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def arguments(folder: Path, device: str) -> list[str]:
    where = "interpret" if device == "cpu" else device
    return [str(folder), "--device", where, "--dtype", "float32", "--threads", "1", "--slots-percent", "50"]


@pytest.mark.slow
@pytest.mark.usefixtures("ft_home")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3.5"])
def test_a_sound_model_passes(kind: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(arguments(models.write(kind, tmp_path / "model"), device)) == 0
    said = capsys.readouterr().out
    assert "ok: 2 layers, hybrid" in said
    assert max(float(number) for number in re.findall(r"([\d.]+)% off", said)) < 0.01
    assert said.count("the same likeliest token") == 2


@pytest.mark.usefixtures("ft_home")
@pytest.mark.parametrize("fails", [False, True])
def test_pins_are_given_back_while_the_experts_are_there_still(
    fails: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's book of registered memory, looked at when the experts' memory goes: nothing of it may be in there."""
    runtime, registered_at = Runtime(), []

    def pin(banks: dict[int, ExpertBank], device: torch.device) -> PinnedBanks:
        for bank in banks.values():
            runtime.registered[bank.blocks.data_ptr()] = bank.blocks.nbytes
            pins.append(Pinned(((bank.blocks.data_ptr(), bank.blocks.nbytes),), runtime.cudaHostUnregister))
            weakref.finalize(bank, lambda: registered_at.append(("experts gone", len(runtime.registered))))
        return PinnedBanks(Resolved(True, "for this test"), pins)

    class Run:
        def __init__(self, model: GpuDecoder, cache: CacheTensors) -> None:
            registered_at.append(("at work", len(runtime.registered)))
            self.tokens = []

        def logits(self) -> None:
            if fails:
                raise FtError("the lane fails", "ft doctor")

        recorded = logits

    close = GpuDecoder.close

    def closed(model: GpuDecoder) -> None:
        registered_at.append(("closed", len(runtime.registered)))
        close(model)

    pins: list[Pinned] = []
    monkeypatch.setattr(gpu_check, "pin_banks", pin)
    monkeypatch.setattr(gpu_check, "Run", Run)
    monkeypatch.setattr(GpuDecoder, "close", closed)
    checkpoint = Checkpoint.open(models.write("mixtral", tmp_path / "model"))
    options = gpu_options.parse("gpu_check", None, arguments(checkpoint.path, device))
    with pytest.raises(FtError) if fails else nullcontext():
        gpu_check._computed(checkpoint, options)
    gc.collect()
    layers = len(pins)
    assert layers == 2
    # `prepare` closes what was prepared before, while all is pinned.
    at_work = [("closed", layers), ("at work", layers), ("closed", layers)]
    assert registered_at == [*at_work, *[("experts gone", 0)] * layers]


@pytest.mark.slow
@pytest.mark.usefixtures("ft_home")
def test_skipped_work_is_seen(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_experts, "gated_swiglu_act", lambda projected, gates, out: out.zero_())
    assert gpu_check.main(arguments(models.write("qwen3.5", tmp_path / "model"), device)) == 1
    said = capsys.readouterr().out
    assert re.search(r"experts: [\d.]+% off at the most \(layer \d\), more than 0.10%", said)
    assert re.search(r"mixers: 0.00% off", said), "the others are not at fault"
    assert re.search(r"decode: .*: WRONG", said)
    assert "WRONG: 2 layers" in said
