"""Predicted speed: against rates that were served and timed, and against the formula's own properties."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from ftengine.config import EngineConfig
from ftengine.experts.split import LaneCosts
from ftengine.kernels import native
from ftengine.memory.plan import resolve_dtype
from ftengine.models.gpu.strategy import FORETOLD, Choice, Lanes, missing_experts
from ftlaunch.cli import main
from ftlaunch.cli.fit import _explain
from ftlaunch.cli.output import Output, value
from ftlaunch.machine import bundled, catalogue, hits, lanes, memory_read, model, predict, served
from ftlaunch.machine.fit import Fit, Model, Room, fit, read
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.speed import WIDEST, Machine, Span, Speed, dense_bytes, routed_bytes, total
from ftlaunch.machine.speed import predict as predicted

GIB = 1 << 30
NVFP4 = "qwen3.6-35b-a3b-nvfp4"
# One H200 and 15 threads, docs/performance.md: costs of missing experts as `ft serve` measured them
H200 = Machine(host=95e9, lane=95e9, device=4.3e12, link=50e9, threads=16, kernels="amx")
LANES = Lanes(LaneCosts(3.6, 34.8, 25.7, 17.3), LaneCosts(4.3, 35.8, 20.0, 21.0), 18.9)
NEXT = Lanes(LaneCosts(4.0, 34.8, 28.2, 19.5), LaneCosts(5.6, 36.4, 33.7, 18.5), 21.5)  # another host of the kind
FEW = Lanes(LaneCosts(3.6, 34.8, 40.0, 41.5), LaneCosts(4.3, 35.8, 42.0, 43.0), 13.6)  # four threads
SERVED = [
    # lanes, strategy, share in slots, hits counted; tokens a second, seconds of a cold prompt of 512 tokens. Those of
    # prompts with less than all in slots are of a server that took 0.13 s more for what it computes than today's
    (LANES, "resident", 1.0, 1.0, 442, (0.10, 0.155)),
    (LANES, "hybrid", 0.25, 0.85, 257, (0.24, 0.47)),
    (LANES, "hybrid", 0.10, 0.66, 207, (0.28, 0.55)),
    (LANES, "offload", 0.25, 0.85, 247, None),
    (LANES, "offload", 0.10, 0.66, 157, (0.30, 0.52)),
    (LANES, "cpu", 0.0, 0.0, 107, (0.32, 0.53)),
    (NEXT, "resident", 1.0, 1.0, 443, (0.123, 0.183)),
    (NEXT, "hybrid", 0.25, 0.849, 255, (0.305, 0.495)),
    (NEXT, "hybrid", 0.10, 0.641, 191, (0.368, 0.461)),
    (NEXT, "cpu", 0.0, 0.0, 102, (0.362, 0.529)),
    (FEW, "hybrid", 0.25, 0.85, 245, None),
    (FEW, "hybrid", 0.10, 0.66, 181, None),
    (FEW, "cpu", 0.0, 0.0, 60, (0.32, 0.54)),
]


def on_gpu(strategy: str, share: float) -> tuple[Model, Fit]:
    model = bundled.model(NVFP4)
    choice = Choice(strategy, "of a test", {})  # type: ignore[arg-type]
    return model, Fit("cuda", slots=round(share * model.sizes.total), strategy=choice)


@pytest.mark.parametrize(("lanes", "strategy", "share", "rate", "tokens", "seconds"), SERVED)
def test_what_was_served_on_a_gpu(
    lanes: Lanes, strategy: str, share: float, rate: float, tokens: float, seconds: tuple[float, float] | None
) -> None:
    """The range of the stated hit curve contains it; with the counted hits the likely rate is within 12 %."""
    model, told = on_gpu(strategy, share)
    before = predicted(model, told, H200, hits.expected(share), lanes)
    after = predicted(model, told, H200, hits.counted(rate), lanes)
    assert before is not None
    assert after is not None
    assert before.decode.low <= tokens <= before.decode.high
    assert after.decode.likely == pytest.approx(tokens, rel=0.12)
    if seconds is not None:
        assert before.prompt.low <= sum(seconds) / 2 <= before.prompt.high


ASSUMED = [
    # threads of the lane, bytes a second that they read; strategy, share in slots, tokens a second. Of three hosts of a
    # kind: on one, memory was read at 107 to 130 GB/s within minutes, on another at 138 to 152
    (15, (105e9, 107e9, 117e9, 130e9, 152e9), "hybrid", 0.25, (255, 257, 270)),
    (15, (105e9, 107e9, 117e9, 130e9, 152e9), "hybrid", 0.10, (191, 202, 207, 214)),
    (15, (105e9, 107e9, 117e9, 130e9, 152e9), "cpu", 0.0, (101.7, 107, 110)),
    (4, (40e9, 42e9), "hybrid", 0.25, (243, 245, 252)),
    (4, (40e9, 42e9), "hybrid", 0.10, (181,)),
    (4, (42e9,), "cpu", 0.0, (60,)),
]


@pytest.mark.parametrize(("threads", "reads", "strategy", "share", "served"), ASSUMED)
def test_what_was_served_from_bandwidths_alone(
    threads: int, reads: tuple[float, ...], strategy: str, share: float, served: tuple[float, ...]
) -> None:
    """As before the first start, when no lane was measured: the link's generation and what memory gives."""
    model, told = on_gpu(strategy, share)
    for rate in reads:
        host = max(rate, 105e9)
        machine = Machine(host=host, lane=rate, device=4.22e12, link=63e9 * 0.85, threads=threads, kernels="amx")
        made = predicted(model, told, machine, hits.expected(share), predict.assumed_lanes(model, machine))
        assert made is not None
        assert made.decode.high <= WIDEST * made.decode.low * 1.0001
        for tokens in served:
            assert made.decode.low <= tokens <= made.decode.high


@pytest.mark.parametrize(("strategy", "served"), [("hybrid", 285), ("offload", 301)])
@pytest.mark.parametrize("rate", [105e9, 117e9, 130e9, 152e9])
def test_what_was_served_with_copies_ahead_from_bandwidths_alone(strategy: str, served: float, rate: float) -> None:
    """The same of two servers of one host, a quarter of the experts in slots and 14 threads."""
    model, told = on_gpu(strategy, 0.25)
    machine = Machine(host=rate, lane=rate, device=4.22e12, link=63e9 * 0.85, threads=14, kernels="amx")
    costs = predict.assumed_lanes(model, machine)
    made = predicted(model, told, machine, hits.expected(0.25), costs, hits.foretold(None))
    assert made is not None
    assert made.decode.low <= served <= made.decode.high
    assert made.decode.likely == pytest.approx(served, rel=0.05)


def test_what_was_served_from_the_doctors_lanes() -> None:
    """On the host whose experts the doctor computed at 110 GB/s, and `ft serve` in 25 + 18 n us a layer."""
    known = {
        "gpu.gather": {"bytes_per_second": 50.7e9},
        "gpu.lanes": {"cpu_bytes_per_second": 110e9, "together_bytes_per_second": 160e9, "handshake_us": 19.0},
    }
    model, told = on_gpu("cpu", 0.0)
    found = lanes.measured(known, model.sizes.block, 15)
    assert found is not None
    assert found.rough
    serves = Lanes(LaneCosts(3.6, 34.8, 25.0, 18.0), LaneCosts(4.3, 35.8, 20.0, 21.0), 19.0)
    made, real = (predicted(model, told, H200, hits.expected(0.0), costs) for costs in (found, serves))
    assert made is not None
    assert real is not None
    assert made.decode.low < real.decode.likely < made.decode.high


def test_a_range_is_at_most_twice_as_wide() -> None:
    for share in (0.0, 0.03, 0.1, 0.2, 0.25, 0.5, 0.9, 1.0):
        for strategy in ("hybrid", "offload", "cpu"):
            model, told = on_gpu(strategy, share)
            for rate in (8e9, 25e9, 50e9):
                machine = replace(H200, link=rate, device=rate * 20)
                for foretold in (hits.NO_FORESIGHT, hits.foretold(None)):
                    made = predicted(model, told, machine, hits.expected(share), LANES, foretold)
                    assert made is not None
                    for span in (made.decode, made.prompt):
                        assert span.low <= span.likely <= span.high <= span.low * WIDEST * 1.0001
                    for term in made.decode_terms:
                        assert 0 <= term.ms.low <= term.ms.likely <= term.ms.high
    made = predicted(bundled.model("demo"), Fit("cpu"), Machine(host=20e9, lane=20e9), hits.expected(1.0))
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
        for foretold in (hits.NO_FORESIGHT, hits.foretold(None)):
            grown = rates([predicted(*on_gpu(strategy, n), H200, hits.expected(n), LANES, foretold) for n in shares])
            assert grown == sorted(grown)
    model, told = on_gpu("hybrid", 0.25)
    known = [hits.foretold(n / 10) for n in range(1, 11)]  # with 0 nothing is copied, nor are there streams for it
    grown = rates([predicted(model, told, H200, hits.expected(0.25), LANES, foretold) for foretold in known])
    assert grown == sorted(grown)
    model, told = on_gpu("hybrid", 0.1)
    faster = [replace(H200, device=n * 1e11) for n in range(1, 50)]
    grown = rates([predicted(model, told, machine, hits.expected(0.1), LANES) for machine in faster])
    assert grown == sorted(grown)
    hosts = [Machine(lane=n * 1e9) for n in range(1, 300, 7)]
    grown = rates([predicted(model, Fit("cpu"), machine, hits.expected(1.0)) for machine in hosts])
    assert grown == sorted(grown)


def test_terms_add_up() -> None:
    """t = D/B_V + h T/B_V + lanes((1-h) T) + L tau, computed here once more."""
    model, told = on_gpu("hybrid", 0.25)
    made = predicted(model, told, H200, hits.counted(0.86), LANES)
    assert made is not None
    dense, slots, layers, absent = made.decode_terms
    assert total(made.decode_terms).likely == pytest.approx(1e3 / made.decode.likely)
    assert dense.bytes == dense_bytes(model)
    assert slots.bytes == pytest.approx(0.86 * 40 * 8 * 1781760)
    assert routed_bytes(model) == 40 * 8 * 1781760
    assert absent.ms.likely == pytest.approx(40 * missing_experts("hybrid", 8, 0.14, LANES).us / 1e3)
    assert layers.ms.likely == pytest.approx(40 * 0.031)
    assert absent.words == "", "nothing is foretold"


# One H200, with copies ahead and without in turn: hits without them, tokens a second without and with, share of missing
# experts that were foretold. In one process with its client, and so slower than the servers above
AHEAD = [
    ("hybrid", 0.25, 1 - 1.07 / 8, 219, 265, 0.86),
    ("offload", 0.25, 1 - 1.05 / 8, 228, 280, 0.83),
    ("hybrid", 0.10, 1 - 3.21 / 8, 175, 213, 0.61),
]


@pytest.mark.parametrize(("strategy", "share", "rate", "without", "tokens", "foretold"), AHEAD)
@pytest.mark.parametrize("lanes", [LANES, NEXT])
def test_what_was_measured_with_copies_ahead(
    lanes: Lanes, strategy: str, share: float, rate: float, without: float, tokens: float, foretold: float
) -> None:
    """The range of what is stated contains it; with the counted shares, copies gain what they did, within 12 %."""
    model, told = on_gpu(strategy, share)
    before = predicted(model, told, H200, hits.expected(share), lanes, hits.foretold(None))
    plain = predicted(model, told, H200, hits.counted(rate), lanes)
    after = predicted(model, told, H200, hits.counted(rate), lanes, hits.foretold(foretold))
    assert before is not None
    assert plain is not None
    assert after is not None
    assert before.decode.low <= tokens <= before.decode.high
    assert after.decode.likely / plain.decode.likely == pytest.approx(tokens / without, rel=0.12)


def test_foresight_is_told() -> None:
    """The term of missing experts, of a layer with as much else to do as the other terms say; its ends are those of
    both shares, and its words have the numbers.
    """
    model, told = on_gpu("hybrid", 0.25)
    curve, stated = hits.expected(0.25), hits.foretold(None)
    assert (stated.low, stated.likely, stated.high, stated.counted) == (*FORETOLD, False)
    made = predicted(model, told, H200, curve, LANES, stated)
    assert made is not None
    *others, absent = made.decode_terms
    hidden = total(others).likely * 1e3 / 40
    likely = missing_experts("hybrid", 8, 0.15, LANES, 0.6, hidden)
    assert absent.ms.likely == pytest.approx(40 * likely.us / 1e3)
    worst = missing_experts("hybrid", 8, 1 - curve.low, LANES, stated.low, hidden)
    best = missing_experts("hybrid", 8, 1 - curve.high, LANES, stated.high, hidden)
    assert absent.ms.high == pytest.approx(1.15 * 40 * worst.us / 1e3)
    assert absent.ms.low == pytest.approx(0.9 * 40 * best.us / 1e3)
    for words in ("of 1.20 missing", f"{likely.copied:.2f} are foretold", "60% stated, 30% to 95%", f"{hidden:.0f} us"):
        assert words in absent.words
    counted = predicted(model, told, H200, curve, LANES, hits.foretold(0.8))
    assert counted is not None
    assert "80% counted, 70% to 90%" in counted.decode_terms[-1].words
    for setting in (("cpu", 0.0), ("resident", 1.0)):
        speed = predicted(*on_gpu(*setting), H200, hits.expected(setting[1]), LANES, stated)
        assert speed is not None
        assert not any(term.words for term in speed.decode_terms)


def test_foresight_counted_elsewhere() -> None:
    """With as many slots: about what was counted. With others: as likely, within what is stated or up to it."""
    assert hits.foretold(0.97) == hits.Hits(pytest.approx(0.87), 0.97, 1.0, counted=True)
    assert hits.foretold(0.04) == hits.Hits(0.0, 0.04, pytest.approx(0.14), counted=True)
    assert hits.foretold(0.97, alike=False) == hits.Hits(FORETOLD[0], 0.97, 0.97, counted=True)
    assert hits.foretold(0.2, alike=False) == hits.Hits(0.2, 0.2, FORETOLD[2], counted=True)


def test_nothing_is_predicted_of_an_unknown_machine() -> None:
    model, told = on_gpu("hybrid", 0.1)
    assert predicted(model, told, H200, hits.expected(0.1), None) is None
    assert predicted(model, told, replace(H200, device=None), hits.expected(0.1), LANES) is None
    assert predicted(model, Fit("cpu"), Machine(), hits.expected(1.0)) is None
    assert predicted(model, Fit("cpu", "too large"), H200, hits.expected(1.0)) is None


def test_hits_counted_with_other_slots() -> None:
    """The curve's misses, as many times more or fewer: with the same slots what was counted."""
    half = hits.carried(0.25, 0.7, 0.25)
    assert (half.likely, half.counted) == (pytest.approx(0.7), True)
    assert hits.carried(0.1, 0.7, 0.25).likely == pytest.approx(max(0.0, 1 - 0.34 * 2))
    assert hits.carried(0.1, hits.expected(0.25).likely, 0.25).likely == pytest.approx(hits.expected(0.1).likely)
    assert hits.carried(0.1, 0.9, 0.0) == hits.carried(0.1, 1.0, 1.0) == hits.expected(0.1)
    for there in (0.05, 0.3, 0.9):
        for rate in (0.0, 0.5, 1.0):
            found = hits.carried(0.2, rate, there)
            assert 0 <= found.low <= found.likely <= found.high <= 1


def test_a_span_is_cut_about_its_middle() -> None:
    cut = Span(1.0, 10.0, 40.0).narrow()
    assert cut.high / cut.low == pytest.approx(WIDEST)
    assert Span(9.0, 10.0, 11.0).narrow() == Span(9.0, 10.0, 11.0)


def test_bundled_facts_are_the_models() -> None:
    """Of Qwen3.6's shape: against sizes from all of its tensors' shapes; read like any model's headers."""
    from ftengine.bench.shapes import QWEN36
    from ftengine.bench.synthetic import SyntheticSource
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
        *("foretold", "prediction", "predicted", "served", "error", "prompt_error"),
    }
    assert data["served"] is None
    assert main(["show", str(demo_model), "--fit", "--explain"]) == 0
    out = capsys.readouterr().out
    for term in data["decode_terms"]:
        assert f"{term['name']}\t{term['formula']}" in out
    for term in [*data["decode_terms"], *data["prompt_terms"]]:
        for symbol in re.findall("[A-Za-z_]+", term["formula"]):
            assert re.search(rf"^{symbol}\t\S", out, re.MULTILINE), f"{symbol} is not explained"
        for symbol, text in term["legend"]:
            assert len(value(symbol, text).splitlines()) == 1, "a screen has 80 columns"
    assert "docs/fit.md" in out.splitlines()[-1]
    assert "layers\tL * tau\t-\t-\t" in out
    (entry,) = served.entries()
    (told,) = entry.predicted
    assert json.loads(msgspec.json.encode(told)) == data["prediction"], "what was told first is kept"
    assert entry.served == ()
    assert main(["show", str(demo_model), "--explain"]) == 2


FLAGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"device": "cpu", "threads": 1}, {"device": "cpu", "strategy": None, "slots": None, "threads": 1}),
    ({"moe_backend": "cpu", "moe_cpu_threads": 2}, {"device": "cuda", "strategy": "cpu", "slots": 0.0, "threads": 2}),
    (
        {"moe_backend": "hybrid", "moe_cache_rate": 0.25, "moe_cpu_threads": 2},
        {"device": "cuda", "strategy": "hybrid", "slots": 0.25, "threads": 2},
    ),
    (
        {"moe_backend": "offload", "moe_cache_rate": 0.5},
        {"device": "cuda", "strategy": "offload", "slots": 0.5, "threads": None},
    ),
    ({}, {"device": "cuda", "strategy": "resident", "slots": 1.0, "threads": None}),
]


@pytest.mark.parametrize(("changes", "setting"), FLAGS)
def test_as_ft_serve_with_flags(
    changes: dict[str, Any],
    setting: dict[str, Any],
    demo_model: Path,
    ft_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The setting is that of the records of such a server, and each has its own prediction; --explain tells of copies
    ahead where there are any.
    """
    monkeypatch.setattr(memory_read, "short", lambda threads=None: 1e10 * (threads or 4))
    known = {
        "gpu.use": {"usable": True, "name": "Fake 4090", "free": 7 * GIB},
        "gpu.device": {"memory_bytes_per_second": 1e12},
        "gpu.link": {"best_bytes_per_second": 31.5e9},
    }
    config = EngineConfig(str(demo_model), **changes).to_json()
    found = {each.id: each for each in model.probe(Asked(model=str(demo_model), config=config, known=known))}
    dtype = "float32" if resolve_dtype("auto", device=setting["device"]).value == "float32" else None
    assert found["model.speed"].data["prediction"]["setting"] == {**setting, "dtype": dtype}
    rates = found["model.speed"].data["tokens_per_second"]
    assert 0 < rates["low"] <= rates["likely"] <= rates["high"]
    ahead = setting["strategy"] in ("hybrid", "offload")
    assert found["model.speed"].data["foretold"]["likely"] == (FORETOLD[1] if ahead else 0.0)
    _explain(Output(), list(found.values()))
    told = capsys.readouterr().out
    legend = {line.partition("\t")[0] for line in told.splitlines()}
    for term in (*found["model.speed"].data["decode_terms"], *found["model.speed"].data["prompt_terms"]):
        assert set(re.findall("[A-Za-z_]+", term["formula"])) <= legend
    assert [line for line in told.splitlines() if "60% stated" in line] == [
        f"missing experts: {term['words']}" for term in found["model.speed"].data["decode_terms"] if term["words"]
    ]
    assert ("60% stated" in told) == ahead


def test_float32_has_a_prediction_of_its_own(demo_model: Path, ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: keys and values are twice as long, and the instructions for bfloat16 are of no use; by the formula
    and the rates of docs/fit.md. On a GPU nothing is told, as nothing was measured.
    """
    monkeypatch.delenv("FT_ISA", raising=False)
    monkeypatch.setattr(memory_read, "short", lambda threads=None: 4e10)
    monkeypatch.setattr(native, "kernel_choice", lambda: ("avx512_bf16", "as in a test"))
    asked = {dtype: EngineConfig(str(demo_model), device="cpu", dtype=dtype) for dtype in ("bfloat16", "float32")}
    found, memory = {}, {}
    for dtype, config in asked.items():
        told = {each.id: each for each in model.probe(Asked(model=str(demo_model), config=config.to_json()))}
        found[dtype], memory[dtype] = told["model.speed"].data, told["model.memory"].data["needed"]
    half, whole = found["bfloat16"], found["float32"]
    assert (half["prediction"]["setting"]["dtype"], whole["prediction"]["setting"]["dtype"]) == (None, "float32")
    token = read(demo_model).demand.token
    terms = [{term["name"]: term for term in each["decode_terms"]}["dense weights, state"] for each in (half, whole)]
    assert terms[1]["bytes"] - terms[0]["bytes"] == 512 * token
    assert memory["float32"] - memory["bfloat16"] == 8192 * token
    computing = [each["prompt_terms"][0]["ms"]["likely"] for each in (half, whole)]
    assert computing[1] / computing[0] == pytest.approx(95 / 45)
    known = {
        "gpu.use": {"usable": True, "name": "Fake 4090", "free": 7 * GIB},
        "gpu.device": {"memory_bytes_per_second": 1e12},
    }
    config = EngineConfig(str(demo_model), dtype="float32").to_json()
    told = {each.id: each for each in model.probe(Asked(model=str(demo_model), config=config, known=known))}
    assert told["model.speed"].value == "not predicted: with --dtype float32 nothing was measured on a GPU"


def test_a_strategy_is_told_before_anything_was_measured(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From bandwidths, and it says so; without the link's there is nothing to go by."""
    monkeypatch.setattr(memory_read, "short", lambda threads=None: 1e10 * (threads or 4))
    known = {"gpu.use": {"usable": True, "name": "Fake 4090", "free": 7 * GIB}}
    config = EngineConfig(str(demo_model), moe_cache_rate=0.25).to_json()

    def reason(**more: object) -> str:
        asked = Asked(model=str(demo_model), config=config, known={**known, **more})
        (found,) = (each for each in model.probe(asked) if each.id == "model.strategy")
        return found.data["reason"]

    assert "not measured" in reason()
    told = reason(**{"gpu.link": {"best_bytes_per_second": 31.5e9}})
    assert "predicted a token for experts without a slot" in told
    assert told.endswith("by bandwidths, the lanes were not measured with its experts")


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
    machine = Machine(lane=30e9)
    made = [predicted(model, Fit("cpu"), machine, hits.expected(1.0)) for model in (real, holes)]
    assert made[0] == made[1]


MOST_OTHERS = 0.05  # of the CPUs, that other programs may take in a round that counts
STEADY = 0.15  # that memory's bandwidth may change by in it


def busy_others() -> tuple[float, float]:
    """Seconds of CPU that other processes have taken so far, and of all CPUs that have passed."""
    times, mine = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return sum(times) - idle - mine.user - mine.system, sum(times)


@pytest.mark.slow
@pytest.mark.skipif(not native.AVAILABLE, reason="the native library is not built")
@pytest.mark.parametrize("which", ["demo", "8 layers of Qwen3.6"])
def test_what_is_served_on_this_cpu(which: str, demo_model: Path) -> None:
    """The whole model through the scheduler, and bandwidth before and after it: the range contains its rate.

    Where others compute, threads wait for each other in every step and no prediction holds: only rounds count in which
    nobody did and memory stayed as fast. Skipped where there is none.
    """
    import torch

    from ftengine.bench.shapes import QWEN36
    from ftengine.bench.synthetic import SyntheticSource, synthetic_model
    from ftengine.bench.whole_model import measure
    from ftengine.formats.format import NVFP4
    from ftengine.memory import estimate
    from ftengine.memory.vram import Demand
    from ftengine.models.base import ModelOptions, load
    from ftengine.weights.checkpoint import Checkpoint
    from ftlaunch.machine.fit import described

    torch.set_num_threads(native.granted_threads())
    if which == "demo":
        facts, loaded = read(demo_model), load(Checkpoint.open(demo_model), ModelOptions("bfloat16"))
    else:
        config = {**QWEN36, "num_hidden_layers": 8}
        source = SyntheticSource(config, NVFP4)
        demand = Demand.of(estimate.weight_sizes(source, config), config, "bfloat16", 4096)
        facts = described(Path(which), "Qwen3_5MoeForConditionalGeneration", source, config, demand)
        loaded = synthetic_model(8, "bfloat16", NVFP4)
    buffer, seen = memory_read.filled(512 << 20, 256 << 20), []
    for _ in range(8):
        before, (others, all_cpus) = memory_read.bandwidth(buffer, native.granted_threads()), busy_others()
        found = measure(loaded, prompt=128, batches=(1,), tokens=48).decodes[0].tokens_per_second
        taken = (busy_others()[0] - others) / (busy_others()[1] - all_cpus)
        after = memory_read.bandwidth(buffer, native.granted_threads())
        if taken > MOST_OTHERS or abs(after / before - 1) > STEADY:
            continue
        machine = replace(predict.machine_of(Asked(), measure=False), lane=(before + after) / 2)
        told = predicted(facts, fit(facts, Room(64 * GIB, "of a test")), machine, hits.expected(1.0))
        assert told is not None
        if told.decode.low <= found <= told.decode.high:
            return
        seen.append((machine.lane, found, told.decode))
    if not seen:
        pytest.skip("other programs computed in every round")
    pytest.fail(f"not within the range in any undisturbed round: {seen}")
