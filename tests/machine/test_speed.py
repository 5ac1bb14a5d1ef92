"""Predicted speed: against rates that were served and timed, and against the formula's own properties."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ftengine.experts.split import LaneCosts
from ftengine.kernels import native
from ftengine.models.gpu.strategy import Choice, Lanes
from ftlaunch.cli import main
from ftlaunch.machine import bundled, catalogue, hits, memory_read, missing, predict
from ftlaunch.machine.fit import Fit, Model, Room, fit, read
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.speed import WIDEST, Machine, Span, Speed, dense_bytes, routed_bytes, total
from ftlaunch.machine.speed import predict as predicted

GIB = 1 << 30
NVFP4 = "qwen3.6-35b-a3b-nvfp4"
# One H200 and 15 threads, docs/performance.md: costs of missing experts as `ft serve` measured them
H200 = Machine(host=95e9, device=4.3e12, link=50e9, threads=16, kernels="amx")
LANES = Lanes(LaneCosts(4.3, 35.8, 25.7, 17.3), LaneCosts(4.3, 36.0, 20.0, 22.0), 19.0)
SERVED = [
    # strategy, share in slots, hits counted; tokens a second, seconds of a first prompt of 512 tokens
    ("resident", 1.0, 1.0, 439, (0.16, 0.33)),
    ("hybrid", 0.25, 0.86, 254, (0.37, 0.47)),
    ("hybrid", 0.10, 0.66, 205, (0.42, 0.55)),
    ("offload", 0.10, 0.66, 159, (0.43, 0.52)),
    ("cpu", 0.0, 0.0, 105, (0.45, 0.53)),
]


def on_gpu(strategy: str, share: float) -> tuple[Model, Fit]:
    model = bundled.model(NVFP4)
    choice = Choice(strategy, "of a test", {})  # type: ignore[arg-type]
    return model, Fit("cuda", slots=round(share * model.sizes.total), strategy=choice)


@pytest.mark.parametrize(("strategy", "share", "rate", "tokens", "seconds"), SERVED)
def test_what_was_served_on_a_gpu(
    strategy: str, share: float, rate: float, tokens: float, seconds: tuple[float, float]
) -> None:
    """The range of the stated hit curve contains it; with the counted hits the likely rate is within 20 %."""
    model, told = on_gpu(strategy, share)
    before = predicted(model, told, H200, hits.expected(share), LANES)
    after = predicted(model, told, H200, hits.counted(rate), LANES)
    assert before is not None
    assert after is not None
    assert before.decode.low <= tokens <= before.decode.high
    assert after.decode.likely == pytest.approx(tokens, rel=0.2)
    assert before.prompt.low <= sum(seconds) / 2 <= before.prompt.high


def test_a_range_is_at_most_twice_as_wide() -> None:
    for share in (0.0, 0.03, 0.1, 0.2, 0.25, 0.5, 0.9, 1.0):
        for strategy in ("hybrid", "offload", "cpu"):
            model, told = on_gpu(strategy, share)
            for rate in (8e9, 25e9, 50e9):
                machine = replace(H200, link=rate, device=rate * 20)
                made = predicted(model, told, machine, hits.expected(share), LANES)
                assert made is not None
                for span in (made.decode, made.prompt):
                    assert span.low <= span.likely <= span.high <= span.low * WIDEST * 1.0001
    made = predicted(bundled.model("demo"), Fit("cpu"), Machine(host=20e9), hits.expected(1.0))
    assert made is not None
    assert made.decode.high <= made.decode.low * WIDEST
    assert made.prompt.high <= made.prompt.low * WIDEST


def test_more_slots_and_more_bandwidth_are_never_slower() -> None:
    def rates(made: list[Speed | None]) -> list[float]:
        found = []
        for speed in made:
            assert speed is not None
            found.append(speed.decode.likely)
        return found

    shares = [n / 40 for n in range(41)]
    for strategy in ("hybrid", "offload"):
        grown = rates([predicted(*on_gpu(strategy, n), H200, hits.expected(n), LANES) for n in shares])
        assert grown == sorted(grown)
    model, told = on_gpu("hybrid", 0.1)
    faster = [replace(H200, device=n * 1e11) for n in range(1, 50)]
    grown = rates([predicted(model, told, machine, hits.expected(0.1), LANES) for machine in faster])
    assert grown == sorted(grown)
    hosts = [Machine(host=n * 1e9) for n in range(1, 300, 7)]
    grown = rates([predicted(model, Fit("cpu"), machine, hits.expected(1.0)) for machine in hosts])
    assert grown == sorted(grown)


def test_terms_add_up() -> None:
    """t = D/B_V + h T/B_V + lanes((1-h) T) + L tau, computed here once more."""
    model, told = on_gpu("hybrid", 0.25)
    made = predicted(model, told, H200, hits.counted(0.86), LANES)
    assert made is not None
    dense, slots, absent, layers = made.decode_terms
    assert total(made.decode_terms).likely == pytest.approx(1e3 / made.decode.likely)
    assert dense.bytes == dense_bytes(model)
    assert slots.bytes == pytest.approx(0.86 * 40 * 8 * 1781760)
    assert routed_bytes(model) == 40 * 8 * 1781760
    assert absent.ms.likely == pytest.approx(40 * missing.missing_us("hybrid", 8, 0.14, LANES) / 1e3)
    assert layers.ms.likely == pytest.approx(40 * 0.031)


def test_missing_experts_by_strategy() -> None:
    """Eight experts, all of them missing: the lines themselves; both lanes are never slower than the better one."""
    assert missing.missing_us("offload", 8, 1.0, LANES) == pytest.approx(4.3 + 8 * 35.8)
    assert missing.missing_us("cpu", 8, 0.0, LANES) == pytest.approx(25.7 + 8 * 17.3)
    assert missing.missing_us("hybrid", 8, 0.0, LANES) == 19.0
    for share in (0.05, 0.3, 0.6, 1.0):
        assert missing.missing_us("hybrid", 8, share, LANES) <= 19.0 + missing.missing_us("offload", 8, share, LANES)
        assert missing.missing_us("hybrid", 8, share, LANES) <= missing.missing_us("cpu", 8, share, LANES)


def test_nothing_is_predicted_of_an_unknown_machine() -> None:
    model, told = on_gpu("hybrid", 0.1)
    assert predicted(model, told, H200, hits.expected(0.1), None) is None
    assert predicted(model, told, replace(H200, device=None), hits.expected(0.1), LANES) is None
    assert predicted(model, Fit("cpu"), Machine(), hits.expected(1.0)) is None
    assert predicted(model, Fit("cpu", "too large"), H200, hits.expected(1.0)) is None


def test_the_curve() -> None:
    values = [hits.expected(n / 200) for n in range(201)]
    assert all(0 <= value.low <= value.likely <= value.high <= 1 for value in values)
    assert [value.likely for value in values] == sorted(value.likely for value in values)
    assert (hits.expected(0.1).likely, hits.expected(0.25).likely, hits.expected(1.0).likely) == (0.66, 0.86, 1.0)


def test_a_span_is_cut_about_its_middle() -> None:
    cut = Span(1.0, 10.0, 40.0).narrow()
    assert cut.high / cut.low == pytest.approx(WIDEST)
    assert Span(9.0, 10.0, 11.0).narrow() == Span(9.0, 10.0, 11.0)


def test_bundled_facts_are_the_models() -> None:
    """Of Qwen3.6's shape: against sizes from all of its tensors' shapes; read like any model's headers."""
    from ftengine.bench.synthetic import QWEN36, SyntheticSource
    from ftengine.formats.format import BF16, NVFP4
    from ftengine.memory import estimate

    for name, format in (("qwen3.6-35b-a3b", BF16), (NVFP4_NAME, NVFP4)):
        model, source = bundled.model(name), SyntheticSource(QWEN36, format, BF16)
        sizes = estimate.weight_sizes(source, QWEN36)
        assert model.sizes.dense == pytest.approx(sizes.dense, rel=0.01)
        assert replace(model.sizes, dense=0) == replace(sizes, dense=0)
        assert model.demand.token == estimate.kv_bytes_per_token(QWEN36, "bfloat16")
        assert model.demand.state == estimate.state_bytes(QWEN36)


NVFP4_NAME = NVFP4


def test_bundled_facts_of_the_demo(demo_model: Path) -> None:
    found, told = read(demo_model), bundled.model("demo")
    assert told.sizes.dense == pytest.approx(found.sizes.dense, rel=0.01)
    assert replace(told.sizes, dense=found.sizes.dense) == found.sizes
    assert (told.architecture, told.products, told.embedding) == (found.architecture, found.products, found.embedding)


def test_the_catalogue() -> None:
    """A machine that holds some: those are told with a range, the others with what they would need."""
    known = {
        "gpu.use": {"usable": True, "name": "Fake 4090", "free": 23 * GIB},
        "gpu.device": {"memory_bytes_per_second": 1e12},
        "gpu.link": {"best_bytes_per_second": 31.5e9},
        "memory.read": {"bytes_per_second": 60e9},
    }
    found = list(catalogue.probe(Asked(known=known)))
    assert {each.data["model"] for each in found[:-1]} == set(bundled.FACTS)
    for each in found[:-1]:
        assert each.data["fits"] == (each.verdict == "ok")
        if each.data["fits"]:
            span = each.data["tokens_per_second"]
            assert 0 < span["low"] <= span["likely"] <= span["high"] <= WIDEST * span["low"] * 1.0001
            assert "estimate from bundled facts" in each.value
    assert found[-1].id == "catalogue.later"
    assert "gpt-oss-120b" in found[-1].data["models"]


def test_explained(demo_model: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(demo_model), "--fit", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    data = next(each["data"] for each in document["findings"] if each["id"] == "model.speed")
    assert set(data) == {
        *("tokens_per_second", "prompt_seconds", "prompt_tokens", "hits", "decode_terms", "prompt_terms"),
        *("predicted", "served", "error"),
    }
    assert data["served"] is None
    assert main(["show", str(demo_model), "--fit", "--explain"]) == 0
    out = capsys.readouterr().out
    for term in data["decode_terms"]:
        assert f"{term['name']}\t{term['formula']}" in out
    assert not ft_home.exists(), "a look keeps nothing"
    assert main(["show", str(demo_model), "--explain"]) == 2


def test_no_weights_are_read(demo_model: Path, tmp_path: Path) -> None:
    """The same from a copy whose weights are a hole."""
    import shutil
    import struct

    hollow = tmp_path / "demo"
    shutil.copytree(demo_model, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = demo_model / "model.safetensors"
    with weights.open("rb") as source, (hollow / weights.name).open("wb") as target:
        length = source.read(8)
        target.write(length + source.read(struct.unpack("<Q", length)[0]))
        target.truncate(weights.stat().st_size)
    real, holes = read(demo_model), read(hollow)
    machine = Machine(host=30e9)
    made = [predicted(model, Fit("cpu"), machine, hits.expected(1.0)) for model in (real, holes)]
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.skipif(not native.AVAILABLE, reason="the native library is not built")
@pytest.mark.parametrize("which", ["demo", "8 layers of Qwen3.6"])
def test_what_is_served_on_this_cpu(which: str, demo_model: Path) -> None:
    """Bandwidth before and after, and between them the whole model through the scheduler; the range contains its rate.

    This wants a quiet machine: where others compute, threads wait for each other in every step and no prediction holds.
    One round of several has to be undisturbed.
    """
    import torch

    from ftengine.bench.synthetic import QWEN36, SyntheticSource, synthetic_model
    from ftengine.bench.whole_model import measure
    from ftengine.formats.format import NVFP4
    from ftengine.memory import estimate
    from ftengine.models.base import ModelOptions, load
    from ftengine.weights.checkpoint import Checkpoint
    from ftlaunch.machine.fit import demand_of, described

    torch.set_num_threads(native.granted_threads())
    if which == "demo":
        facts, loaded = read(demo_model), load(Checkpoint.open(demo_model), ModelOptions("bfloat16"))
    else:
        config = {**QWEN36, "num_hidden_layers": 8}
        source = SyntheticSource(config, NVFP4)
        demand = demand_of(estimate.weight_sizes(source, config), config, "bfloat16", 4096)
        facts = described(Path(which), "Qwen3_5MoeForConditionalGeneration", source, config, demand)
        loaded = synthetic_model(8, "bfloat16", NVFP4)
    buffer, seen = memory_read.filled(512 << 20, 256 << 20), []
    for _ in range(6):
        before = memory_read.bandwidth(buffer, native.granted_threads())
        found = measure(loaded, prompt=128, batches=(1,), tokens=48).decodes[0].tokens_per_second
        after = memory_read.bandwidth(buffer, native.granted_threads())
        machine = replace(predict.machine_of(Asked(), measure=False), host=(before + after) / 2)
        told = predicted(facts, fit(facts, Room(64 * GIB, "of a test")), machine, hits.expected(1.0))
        assert told is not None
        if told.decode.low <= found <= told.decode.high:
            return
        seen.append((machine.host, found, told.decode))
    pytest.fail(f"not within the range in any round: {seen}")
