"""What servers did, kept and compared: counters as the engine writes them, and files that are damaged."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftengine.models.gpu.strategy import FORETOLD, Choice
from ftengine.scheduler.expert_stats import ExpertStats, LayerCounts
from ftengine.scheduler.stats import StepCounts
from ftlaunch.machine import bundled, catalogue, counted, predict, served
from ftlaunch.machine.computing import Computing
from ftlaunch.machine.fit import Fit
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.served import Entry, Predicted, Prompt, Served, Setting
from ftlaunch.machine.speed import WIDEST, Machine, Speed, total
from ftlaunch.machine.speed import predict as predicted
from tests.support.turns import beside_another

MINE = Entry("/models/q", "Fake 9000", "Fake 4060")
WAY = Setting("cuda", "hybrid", 0.1, 7)
DID = Served("one", "2026-01-31", WAY, 40.0, 500, 0.5, Prompt(512, 0.9))
FIRST = Predicted("2026-01-30", WAY, (30.0, 50.0, 60.0), (0.5, 0.6, 0.7), ((256, 0.3), (1024, 1.2)))
replace = msgspec.structs.replace


def stats(
    steps: StepCounts, experts: dict[str, Any] | None = None, device: str = "cpu", firsts: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """/v1/stats as the engine's own structs give it."""
    values = {"device": device, "moe_backend": "hybrid", "threads": 16, "moe_cpu_threads": 15}
    facts = {name: {"value": value, "reason": ""} for name, value in values.items()}
    if device != "cpu":
        facts["gpu"] = {"value": "NVIDIA H200", "reason": "compute capability 9.0"}
    first_tokens = [{"prompt": prompt, "cached": cached, "seconds": seconds} for prompt, cached, seconds in firsts]
    engine = {"steps": msgspec.to_builtins(steps), "experts": experts}
    return {"engine": engine, "facts": facts, "first_tokens": first_tokens}


def test_counters_of_a_server() -> None:
    """Cold prompts of a step or less count, by their median; experts by the fields of /v1/stats."""
    assert {"resident", "slots", "pool", "total"} <= set(ExpertStats.__struct_fields__)
    assert {"hits", "misses", "hit_rate"} <= set(LayerCounts.__struct_fields__)
    experts = {"resident": False, "slots": 25, "pool": 100, "total": {"hits": 85, "misses": 15, "hit_rate": 0.85}}
    firsts = ((512, 0, 0.5), (512, 511, 0.1), (512, 0, 0.4), (9000, 0, 9.0), (5, 0, 0.1), (512, 0, 3.0))
    found = counted.served(stats(StepCounts(200, 1.0, 1, 0, 4.0), experts, "cuda", firsts), "id")
    assert found is not None
    did, gpu = found
    assert did == Served("id", did.day, Setting("cuda", "hybrid", 0.25, 15), 250.0, 200, 0.85, Prompt(512, 0.5))
    assert gpu == "NVIDIA H200"
    on_cpu = counted.served(stats(StepCounts(200, 1.0, 1, 0, 4.0)), "id")
    assert on_cpu is not None
    assert (on_cpu[0].setting, on_cpu[0].prompt, on_cpu[1]) == (Setting("cpu", threads=16), None, None)


def test_foretold_experts_of_a_server(ft_home: Path) -> None:
    """Of those that no slot had: by the counters of the engine, where it copies ahead, and has copied anything."""
    assert {"hits", "misses", "prefetched", "foretold"} <= set(LayerCounts.__struct_fields__)
    total = {"hits": 94, "misses": 6, "hit_rate": 0.8, "prefetched": 20, "foretold": 14}
    cases = [
        ({}, False, 0.7),
        ({"misses": 0}, False, 1.0),
        ({"foretold": 0}, False, 0.0),
        ({"foretold": 0, "misses": 0, "hit_rate": 1.0}, False, None),
        ({"prefetched": 0, "foretold": 0}, False, None),
        ({}, True, None),
    ]
    for changes, resident, expected in cases:
        experts = {"resident": resident, "slots": 25, "pool": 100, "total": total | changes}
        found = counted.served(stats(StepCounts(200, 1.0, 1, 0, 4.0), experts, "cuda"), "id")
        assert found is not None
        assert found[0].foretold == expected
        kept = served.keep(replace(MINE, served=(found[0],)))
        assert served.find(MINE.model, MINE.cpu, MINE.gpu) == kept
        assert kept.served[0].foretold == expected
    with pytest.raises(ValueError, match="not a share"):
        replace(DID, foretold=1.2).__post_init__()


def test_records_from_before_copies_ahead_are_read(ft_home: Path) -> None:
    served.keep(replace(MINE, predicted=(FIRST,), served=(DID,)))
    path = ft_home / "cache" / "speed.json"
    content = json.loads(path.read_text())
    assert content["models"][0]["served"][0].pop("foretold", "") is None
    path.write_text(json.dumps(content))
    assert served.find(MINE.model, MINE.cpu, MINE.gpu).served == (DID,)


def test_counted_foresight_stands_in_place_of_what_is_stated() -> None:
    """By missing experts, where about as many have a slot; it is carried to other settings; none without slots."""
    some, more = replace(DID, foretold=0.8), replace(DID, server="two", foretold=0.5, hit_rate=0.75)
    entry = replace(MINE, served=(some, more))
    found = predict.foretold_of(WAY, entry)
    assert (found.likely, found.counted) == (pytest.approx((2 * 0.8 + 0.5) / 3), True)
    assert found.high - found.low == pytest.approx(0.2)
    carried = predict.foretold_of(replace(WAY, slots=0.25, strategy="offload"), entry)
    assert (carried.likely, carried.counted, carried.low, carried.high) == (
        found.likely,
        True,
        FORETOLD[0],
        FORETOLD[2],
    )
    assert predict.foretold_of(WAY, replace(MINE, served=(DID,))).likely == FORETOLD[1]
    for setting in (replace(WAY, slots=0.0), replace(WAY, strategy="cpu"), Setting("cpu", threads=2)):
        assert predict.foretold_of(setting, entry).high == 0.0


@pytest.mark.parametrize("steps", [StepCounts(63, 1.0, 1, 0, 4.0), StepCounts(500, 1.5, 8, 0, 4.0), StepCounts()])
def test_what_is_not_compared(steps: StepCounts) -> None:
    """Too few steps, several sequences at a time, none at all."""
    assert counted.served(stats(steps), "id") is None


def test_both_are_kept_whichever_comes_first(ft_home: Path) -> None:
    served.keep(replace(MINE, predicted=(FIRST,)))
    known = served.keep(replace(MINE, served=(DID,)))
    assert known == served.find(MINE.model, MINE.cpu, MINE.gpu)
    assert (known.first(WAY), known.runs(WAY)) == (FIRST, [DID])
    assert served.error(FIRST, known.runs(WAY)) == pytest.approx(0.25)
    assert served.prompt_error(FIRST.prompt, known.runs(WAY)) == pytest.approx(0.9 / 0.6 - 1)
    assert not served.find(MINE.model, MINE.cpu, "Another").served
    assert not served.find(MINE.model, "Another", MINE.gpu).predicted
    assert stat.S_IMODE((ft_home / "cache" / "speed.json").stat().st_mode) == 0o600
    for number in range(served.KEPT + 5):
        served.keep(Entry(f"/models/{number}", "Fake 9000", served=(DID,)))
    assert len(json.loads((ft_home / "cache" / "speed.json").read_text())["models"]) == served.KEPT


def test_a_server_that_is_asked_again_counts_once_and_the_first_prediction_stays(ft_home: Path) -> None:
    served.keep(replace(MINE, predicted=(FIRST,), served=(DID,)))
    later, other = replace(DID, steps=900), replace(DID, server="two")
    served.keep(replace(MINE, predicted=(replace(FIRST, day="2026-02-01"),), served=(later,)))
    known = served.keep(replace(MINE, served=(other,)))
    assert (known.predicted, known.served) == ((FIRST,), (other, later))
    for number in range(served.RUNS + 5):
        known = served.keep(replace(MINE, served=(replace(DID, server=str(number)),)))
    assert len(known.served) == served.RUNS
    assert known.served[0].server == str(served.RUNS + 4)


def test_servers_that_end_at_once_lose_no_record(ft_home: Path) -> None:
    """What another one writes between this one's reading and its writing."""
    path, another = ft_home / "cache" / served.FILE_NAME, replace(DID, server="two")
    served.keep(replace(MINE, served=(another,)))
    written = path.read_text()
    path.unlink()
    beside_another(
        path.with_name(served.LOCK_NAME),
        lambda: path.write_text(written),
        lambda: served.keep(replace(MINE, served=(DID,))),
    )
    assert served.find(MINE.model, MINE.cpu, MINE.gpu).served == (DID, another)


def test_a_folder_that_cannot_be_written_to_is_no_failure(ft_home: Path) -> None:
    ft_home.mkdir(exist_ok=True)
    (ft_home / "cache").touch()
    assert served.keep(replace(MINE, served=(DID,))).served == (DID,)


def test_settings_that_are_as_fast() -> None:
    """The same threads and strategy, and about as many slots: of few slots each one counts."""
    assert WAY.alike(replace(WAY, slots=0.11))
    assert WAY.alike(replace(WAY, slots=0.091))
    others = [
        replace(WAY, slots=0.05),
        replace(WAY, slots=0.12),
        replace(WAY, slots=0.085),
        replace(WAY, threads=4),
        replace(WAY, strategy="offload"),
        replace(WAY, device="cpu"),
    ]
    assert not any(WAY.alike(other) for other in others)
    assert Setting("cpu", threads=2).alike(Setting("cpu", threads=2))


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", "{}", '{"version": 1, "models": []}', '{"version": 2, "models": 7}', "\xff",
     '{"version": 2, "models": [7, {}, {"model": "/models/q", "cpu": 1}]}', "[" * 100_000,
     '{"version": 2, "models": [{"model": "/models/q", "cpu": "Fake 9000", "gpu": "Fake 4060", "served": [7]}]}'],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(ft_home: Path, content: str) -> None:
    (ft_home / "cache").mkdir(parents=True)
    (ft_home / "cache" / "speed.json").write_text(content, encoding="latin-1")
    assert served.find(MINE.model, MINE.cpu, MINE.gpu) == MINE
    assert served.keep(replace(MINE, served=(DID,))).served == (DID,)
    assert served.find(MINE.model, MINE.cpu, MINE.gpu).served == (DID,)


def test_lengths_of_prompts_ascend() -> None:
    """Seconds of those between two of them are told from both."""
    with pytest.raises(ValueError, match="do not ascend"):
        replace(FIRST, prompts=((64, 0.1), (64, 0.2))).__post_init__()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_no_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        replace(DID, tokens_per_second=rate).__post_init__()


def runs(*rates: float) -> list[Served]:
    return [replace(DID, server=str(number), tokens_per_second=rate) for number, rate in enumerate(rates)]


def test_one_busy_server_does_not_spoil_the_rate() -> None:
    """Others only ever slow a server down; yet one lucky server among many is not all that is believed."""
    assert served.rate(runs(40.0)) == 40.0
    assert served.rate(runs(12.0, 40.0)) == served.rate(runs(40.0, 39.0, 12.0)) == 40.0
    assert served.rate(runs(80.0, *[40.0] * 7)) == 40.0
    many = [replace(run, prompt=Prompt(512, seconds)) for run, seconds in zip(runs(40, 40), (0.6, 3.0), strict=True)]
    assert served.prompt_error(FIRST.prompt, many) == pytest.approx(0.0)
    assert served.hit_rate([DID, replace(DID, steps=1500, hit_rate=0.9)]) == pytest.approx(0.8)


def told_of(rates: tuple[float, ...], hits: float = 0.66) -> tuple[Speed, Speed]:
    """As predicted with the curve's hits, and what follows from these servers."""
    model = bundled.model("qwen3.6-35b-a3b-nvfp4")
    fit = Fit("cuda", slots=round(0.1 * model.sizes.total), threads=7, strategy=Choice("hybrid", "", {}))
    machine = Machine(host=60e9, lane=60e9, device=250e9, link=12e9)
    entry = replace(MINE, served=tuple(replace(run, hit_rate=hits) for run in runs(*rates)))
    expected = predict.hits_of(predict.setting_of(model, fit), entry)
    made = predicted(model, fit, machine, expected, predict.assumed_lanes(model, machine))
    assert made is not None
    return made, predict.corrected(made, entry.runs(WAY))


def test_after_use_the_range_is_about_what_was_served() -> None:
    """And counted hits stand in place of the curve, where about as many experts have a slot."""
    entry = replace(MINE, served=(replace(DID, hit_rate=0.5),))
    curve, found = predict.hits_of(WAY, MINE), predict.hits_of(WAY, entry)
    assert (curve.likely, curve.counted, found.likely, found.counted) == (pytest.approx(0.66), False, 0.5, True)
    carried = predict.hits_of(replace(WAY, slots=0.25), entry)
    assert carried.counted
    assert carried.likely == pytest.approx(1 - 0.15 * 0.5 / 0.34)
    made, final = told_of((40.0, 11.0), 0.5)
    assert made.decode.likely < told_of(())[0].decode.likely, "fewer hits than the curve's"
    assert final.decode.likely == pytest.approx(40.0)
    assert final.decode.high <= WIDEST * final.decode.low
    assert final.prompt.high <= WIDEST * final.prompt.low
    assert total(final.decode_terms).likely == pytest.approx(1e3 / final.decode.likely), "terms add up"
    assert total(final.prompt_terms).likely == pytest.approx(1e3 * final.prompt.likely)
    assert final.prompt.likely == pytest.approx(0.9, rel=0.01)


def test_what_is_called_wrong_is_not_followed_before_several_servers_say_so() -> None:
    made, once = told_of((11.0,))
    assert made.decode.likely > (1 + predict.FAR) * 11.0
    assert once.decode == made.decode
    assert told_of((11.0, 11.5))[1].decode == made.decode
    assert told_of((11.0, 11.5, 10.8))[1].decode.likely == pytest.approx(11.5)


def test_a_server_that_did_what_was_told_before_is_followed_whatever_memory_reads_today() -> None:
    made, _ = told_of((11.0,))
    for first, followed in ((12.0, True), (17.0, True), (18.0, False), (50.0, False)):
        before = replace(FIRST, tokens_per_second=(0.8 * first, first, 1.2 * first))
        final = predict.corrected(made, runs(11.0), before)
        assert (final.decode.likely == pytest.approx(11.0)) == followed
        assert (final.decode == made.decode) == (not followed)


def test_a_server_that_was_far_too_slow_is_no_ok() -> None:
    error = predict.decode_error(told_of((11.0,))[0], runs(11.0))
    assert error is not None
    plain = predict.Finding("model.speed", "speed", "a rate")
    assert predict.judged(plain, 52.0, "follow", runs(40.0), Asked()) == plain
    found = predict.judged(plain, 38.5, "follow from a reading", runs(11.0), Asked())
    assert (found.verdict, found.cost) == (
        "note",
        "1 server of it made 11 tokens/s where 38.5 follow from a reading; followed once 3 servers were so slow",
    )
    assert found.mend == "look again in some minutes; ft doctor tells what slows this machine down"
    counted = Computing(others=1.5, programs={"cc1plus": 1.5}, cpus=2).as_json()
    found = predict.judged(plain, 38.5, "follow", runs(11.0), Asked(known={"cpu.load": counted}))
    who = "other programs with 1.5 of 2 CPUs (cc1plus)"
    assert found.mend == f"end what computes now, which is {who}, and look again"


def test_the_doctor_compares(ft_home: Path) -> None:
    """Models of this machine only."""
    served.keep(replace(MINE, predicted=(FIRST,), served=(DID,)))
    served.keep(Entry("/models/other", "Another", predicted=(FIRST,), served=(DID,)))
    served.keep(Entry("/models/predicted-only", MINE.cpu, predicted=(FIRST,)))
    served.keep(Entry("/models/slow", MINE.cpu, predicted=(FIRST,), served=(replace(DID, tokens_per_second=14.0),)))
    slow, found = catalogue.compared(Asked(known={"cpu.processor": {"name": MINE.cpu}}))
    assert found.value == (
        "q (hybrid, 10% of its experts in slots, 7 threads): served 40 tokens/s on 2026-01-31, "
        "the first prediction was +25% off, that of a prompt's speed +50%"
    )
    assert (found.verdict, slow.verdict) == ("ok", "note")
    assert "made 14 tokens/s where 50 were predicted first" in slow.cost


def test_an_entry_is_of_the_model_that_is_asked_about(demo_model: Path) -> None:
    from ftlaunch.machine.fit import read

    known = {"cpu.processor": {"name": "Fake 9000"}, "gpu.use": {"name": "Fake 4060"}}
    mine = predict.entry_of(read(demo_model), Fit("cuda"), Asked(known=known))
    assert mine == Entry(str(demo_model.absolute()), "Fake 9000", "Fake 4060")
    assert predict.entry_of(read(demo_model), Fit("cpu"), Asked(known=known)).gpu is None
