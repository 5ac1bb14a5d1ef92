"""What servers did, kept and compared: against a server that computes the demo, counters as the engine writes them, and
files that are damaged.
"""

from __future__ import annotations

import json
import stat
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftengine.models.gpu.strategy import Choice
from ftengine.scheduler.expert_stats import ExpertStats, LaneCost, LayerCounts
from ftengine.scheduler.stats import StepCounts
from ftlaunch.cli import main
from ftlaunch.machine import bundled, catalogue, predict, served
from ftlaunch.machine.fit import Fit
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.served import Entry, Predicted, Served
from ftlaunch.machine.speed import WIDEST, Machine, total

MINE = Entry("/models/q", "Fake 9000", "Fake 4060")
DID = Served("2026-01-31", 40.0, 500, "cuda", "hybrid", 0.1, 0.5)
FIRST = Predicted("2026-01-30", (30.0, 50.0, 60.0), (0.5, 0.6, 0.7))


def stats(steps: StepCounts, experts: ExpertStats | None = None, device: str = "cpu") -> dict[str, Any]:
    """/v1/stats as the engine's own structs give it."""
    facts = {"device": {"value": device, "reason": ""}, "moe_backend": {"value": "hybrid", "reason": ""}}
    if device != "cpu":
        facts["gpu"] = {"value": "NVIDIA H200", "reason": "compute capability 9.0"}
    engine = {"steps": msgspec.to_builtins(steps), "experts": msgspec.to_builtins(experts)}
    return {"engine": engine, "facts": facts}


def test_counters_of_a_server() -> None:
    counted = LayerCounts(85, 15, 0.85, *[0] * 9, 0.0)
    experts = ExpertStats(
        resident=False, slots=25, pool=100, layer_count=1, decode_steps=9, total=counted, cpu_ms=1.0, link_ms=1.0,
        link_cost=LaneCost(1.0, 1.0), cpu_cost=LaneCost(1.0, 1.0), cpu_share=None, background=1.0, layers=None,
    )  # fmt: skip
    found = served.served(stats(StepCounts(200, 1.0, 1, 0, 4.0), experts, "cuda"))
    assert found is not None
    did, gpu = found
    assert (did.tokens_per_second, did.steps, did.device, did.slots, did.hit_rate) == (250.0, 200, "cuda", 0.25, 0.85)
    assert (did.strategy, gpu) == ("hybrid", "NVIDIA H200")


@pytest.mark.parametrize("steps", [StepCounts(63, 1.0, 1, 0, 4.0), StepCounts(500, 1.5, 8, 0, 4.0), StepCounts()])
def test_what_is_not_compared(steps: StepCounts) -> None:
    """Too few steps, several sequences at a time, none at all."""
    assert served.served(stats(steps)) is None


def test_both_are_kept_whichever_comes_first(ft_home: Path) -> None:
    served.keep(msgspec.structs.replace(MINE, predicted=FIRST))
    known = served.keep(msgspec.structs.replace(MINE, served=DID))
    assert known == served.find(Path(MINE.model), MINE.cpu, MINE.gpu)
    assert (known.predicted, known.served) == (FIRST, DID)
    assert known.error == pytest.approx(0.25)
    assert served.find(Path(MINE.model), MINE.cpu, "Another") is None
    assert served.find(Path(MINE.model), "Another", MINE.gpu) is None
    assert stat.S_IMODE((ft_home / "cache" / "speed.json").stat().st_mode) == 0o600
    for number in range(served.KEPT + 5):
        served.keep(Entry(f"/models/{number}", "Fake 9000", served=DID))
    assert len(json.loads((ft_home / "cache" / "speed.json").read_text())["models"]) == served.KEPT


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", "{}", '{"version": 2, "models": []}', '{"version": 1, "models": 7}', "\xff",
     '{"version": 1, "models": [7, {}, {"model": "/models/q", "cpu": 1}]}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(ft_home: Path, content: str) -> None:
    (ft_home / "cache").mkdir(parents=True)
    (ft_home / "cache" / "speed.json").write_text(content, encoding="latin-1")
    assert served.find(Path(MINE.model), MINE.cpu, MINE.gpu) is None
    assert served.keep(msgspec.structs.replace(MINE, served=DID)).served == DID
    assert served.find(Path(MINE.model), MINE.cpu, MINE.gpu) is not None


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_no_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        msgspec.structs.replace(DID, tokens_per_second=rate).__post_init__()


def test_after_use_the_range_is_about_what_was_served() -> None:
    """And counted hits stand in place of the curve, where about as many experts have a slot."""
    model = bundled.model("qwen3.6-35b-a3b-nvfp4")
    told = Fit("cuda", slots=round(0.1 * model.sizes.total), strategy=Choice("hybrid", "", {}))
    machine = Machine(host=60e9, device=250e9, link=12e9)
    first, curve = predict.speed(model, told, machine, None, None) or pytest.fail("nothing is predicted")
    entry = msgspec.structs.replace(MINE, predicted=served.predicted(first), served=DID)
    again, counted = predict.speed(model, told, machine, None, entry) or pytest.fail("nothing is predicted")
    assert (curve.likely, curve.counted, counted.likely, counted.counted) == (0.66, False, 0.5, True)
    corrected = predict.corrected(first, told, entry)
    final = corrected.decode
    assert total(corrected.decode_terms).likely == pytest.approx(1e3 / final.likely), "terms add up"
    assert final.likely == pytest.approx(DID.tokens_per_second, rel=0.01)
    assert final.high <= WIDEST * final.low
    assert again.decode.likely < first.decode.likely
    other = msgspec.structs.replace(entry, served=msgspec.structs.replace(DID, strategy="offload"))
    assert predict.corrected(first, told, other) == first, "served in another way"


@pytest.mark.slow
def test_a_server_is_remembered(demo_model: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ft stop` keeps what it did, `ft show --fit` compares it with what was predicted."""
    from ftlaunch.servers import start_background, wait_ready

    record = start_background(str(demo_model))
    wait_ready(record)
    body = json.dumps({"prompt": "Once", "max_tokens": 120, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {record.api_key}"}
    request = urllib.request.Request(f"{record.url}/v1/completions", body, headers)
    began = time.monotonic()
    urllib.request.urlopen(request, timeout=120).read()
    rate = 120 / (time.monotonic() - began)
    assert main(["stop", "--all"]) == 0
    capsys.readouterr()
    assert main(["show", str(demo_model), "--fit", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    data = next(each["data"] for each in document["findings"] if each["id"] == "model.speed")
    assert data["served"]["tokens_per_second"] == pytest.approx(rate, rel=0.5)
    assert data["error"] == pytest.approx(
        data["predicted"]["tokens_per_second"][1] / data["served"]["tokens_per_second"] - 1
    )


def test_the_doctor_compares(ft_home: Path) -> None:
    """Models of this machine only."""
    served.keep(msgspec.structs.replace(MINE, predicted=FIRST, served=DID))
    served.keep(Entry("/models/other", "Another", predicted=FIRST, served=DID))
    served.keep(Entry("/models/predicted-only", MINE.cpu, predicted=FIRST))
    (found,) = catalogue.compared(Asked(known={"cpu.processor": {"name": MINE.cpu}}))
    assert found.value == "q: 40 tokens/s on 2026-01-31, the first prediction was +25% off"


def test_an_entry_is_of_the_model_that_is_asked_about(demo_model: Path) -> None:
    from ftlaunch.machine.fit import read

    known = {"cpu.processor": {"name": "Fake 9000"}, "gpu.use": {"name": "Fake 4060"}}
    mine = predict.entry_of(read(demo_model), Fit("cuda"), Asked(known=known))
    assert mine == Entry(str(demo_model.absolute()), "Fake 9000", "Fake 4060")
    assert predict.entry_of(read(demo_model), Fit("cpu"), Asked(known=known)).gpu is None
