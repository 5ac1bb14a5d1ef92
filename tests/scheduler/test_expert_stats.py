"""What the log says of the expert cache, and what it warns of. That numbers are read right: tests/gpu."""

from __future__ import annotations

import logging

import msgspec
import pytest

from ftengine.scheduler.expert_stats import (
    ENOUGH_STEPS,
    WINDOW_STEPS,
    ExpertStats,
    Idleness,
    LaneCost,
    LayerCounts,
    describe,
)
from ftengine.scheduler.stats import CacheCounts, EngineStats, RequestCounts, StepCounts, TokenCounts, WorkLog
from tests.scheduler.driver import Driver
from tests.scheduler.spawn import ROOT
from tests.scheduler.tiny import TinyModel

ZERO = LayerCounts(**dict.fromkeys(LayerCounts.__struct_fields__, 0))


def counts(**values) -> LayerCounts:
    return msgspec.structs.replace(ZERO, **values)


def stats(total: LayerCounts, **values) -> ExpertStats:
    usual = {
        "resident": False,
        "slots": 10,
        "pool": 64,
        "layer_count": 2,
        "decode_steps": ENOUGH_STEPS,
        "total": total,
        "cpu_ms": 0.0,
        "link_ms": 0.0,
        "link_cost": LaneCost(3.0, 35.0),
        "cpu_cost": LaneCost(8.0, 26.0),
        "cpu_share": None,
        "background": 1.0,
        "prefetch": 0,
    }
    return ExpertStats(**{**usual, **values})


WELL = counts(hits=900, misses=600, fetched=300, cpu_experts=300, cpu_routes=310, admitted=20)

IDLE = [
    (stats(WELL), []),
    (stats(msgspec.structs.replace(WELL, hits=0)), ["the cache of 10 experts is on"]),
    (stats(msgspec.structs.replace(WELL, foretold=900)), ["the cache of 10 experts is on, and none of 1500 was"]),
    (stats(msgspec.structs.replace(WELL, foretold=899)), []),
    (stats(msgspec.structs.replace(WELL, hits=0), decode_steps=ENOUGH_STEPS - 1), []),
    (stats(msgspec.structs.replace(WELL, hits=0), slots=0), []),
    (stats(msgspec.structs.replace(WELL, admitted=0)), ["may be copied to the GPU in the background"]),
    (stats(msgspec.structs.replace(WELL, admitted=0), background=0.0), []),
    (stats(msgspec.structs.replace(WELL, cpu_experts=0, admitted=0)), ["may be computed on the CPU"]),
    (stats(msgspec.structs.replace(WELL, cpu_experts=0, admitted=0), cpu_share=0.0), []),
    (stats(counts(misses=600)), ["the cache of 10 experts is on", "may be computed on the CPU"]),
    (stats(ZERO, resident=True), []),
    (stats(ZERO), []),
]


@pytest.mark.parametrize(("found", "said"), IDLE, ids=range(len(IDLE)))
def test_what_is_on_and_does_nothing_is_told_once(found: ExpertStats, said: list[str]) -> None:
    idleness = Idleness()
    sentences = idleness.check(found)
    assert len(sentences) == len(said)
    for sentence, part in zip(sentences, said, strict=True):
        assert part in sentence
    assert idleness.check(found) == []


def ahead(steps: int, prefetched: int, foretold: int, misses: int = 10**6, prefetch: int = 4) -> ExpertStats:
    """Everything else does something."""
    total = counts(
        hits=10**6 + foretold, misses=misses, cpu_experts=400, admitted=20, prefetched=prefetched, foretold=foretold
    )
    return stats(total, decode_steps=steps, prefetch=prefetch)


USELESS = [
    (ahead(WINDOW_STEPS, 1000, 250), ""),
    (ahead(WINDOW_STEPS, 1000, 249), "of 1000 experts that were copied to the GPU before their layer began 25% were"),
    (ahead(WINDOW_STEPS, 1000, 0), f"0% were used, in {WINDOW_STEPS} steps; prefetching rests for layers where"),
    (ahead(WINDOW_STEPS, ENOUGH_STEPS - 1, 0), ""),
    (ahead(WINDOW_STEPS - 1, 1000, 0), ""),
    (ahead(WINDOW_STEPS, 1000, 0, prefetch=0), ""),
    (ahead(WINDOW_STEPS, 0, 0, 700), f"with 700 missing ones none was, in {WINDOW_STEPS} steps"),
    (ahead(WINDOW_STEPS, 0, 0, ENOUGH_STEPS - 1), ""),
    (ahead(WINDOW_STEPS - 1, 0, 0), ""),
    (ahead(WINDOW_STEPS, 0, 0, prefetch=0), ""),
]


@pytest.mark.parametrize(("found", "said"), USELESS, ids=range(len(USELESS)))
def test_prefetching_that_brings_nothing_is_told_once(found: ExpertStats, said: str) -> None:
    idleness = Idleness()
    sentences = idleness.check(found)
    assert len(sentences) == bool(said)
    assert said in "".join(sentences)
    again = msgspec.structs.replace(found, decode_steps=found.decode_steps + WINDOW_STEPS)
    again.total = msgspec.structs.replace(again.total, prefetched=again.total.prefetched + 10**6, misses=2 * 10**6)
    assert len(idleness.check(again)) == (found.prefetch > 0 and not said)


def test_good_guesses_of_before_hide_no_bad_ones() -> None:
    """Windows are judged one by one; a time without prefetching is none."""
    idleness = Idleness()
    assert idleness.check(ahead(WINDOW_STEPS, 100_000, 90_000)) == []
    assert idleness.check(ahead(2 * WINDOW_STEPS - 1, 101_000, 90_100)) == []
    (sentence,) = idleness.check(ahead(2 * WINDOW_STEPS, 101_000, 90_100))
    assert sentence.startswith("of 1000 experts that were copied to the GPU before their layer began 10% were used")

    idleness = Idleness()
    off = WINDOW_STEPS // 2
    assert idleness.check(ahead(off, 0, 0, prefetch=0)) == []
    assert idleness.check(ahead(off + WINDOW_STEPS - 1, 0, 0, 2 * 10**6)) == []
    assert len(idleness.check(ahead(off + WINDOW_STEPS, 0, 0, 2 * 10**6))) == 1


def test_the_log_tells_of_what_happened_since_the_last_line() -> None:
    before = counts(
        hits=100, misses=100, fetched=90, cpu_experts=10, cpu_routes=12, admitted=5, link_bytes=10**9, link_ms=100.0,
        cpu_bytes=3 * 10**9, cpu_ms=250.0,
    )  # fmt: skip
    now = counts(
        hits=400, misses=200, fetched=190, cpu_experts=10, cpu_routes=12, admitted=7, link_bytes=3 * 10**9,
        link_ms=1000.0, cpu_bytes=3 * 10**9, cpu_ms=250.0,
    )  # fmt: skip
    told = "experts 75.0% in slots, 100 fetched, 2 admitted, link 1.00 GB/s (45% of the time)"
    assert describe(now, before, 2.0) == told
    assert describe(now, None, 1.0) == (
        "experts 66.7% in slots, 190 fetched, 10 on the CPU (12 routes), 7 admitted, "
        "link 3.00 GB/s (100% of the time), CPU 3.00 GB/s (25% of the time)"
    )
    assert describe(now, now, 1.0) == ""


def test_the_log_leaves_out_what_nothing_was_counted_of() -> None:
    """Prefill alone: nothing is looked up. A lane that was hardly busy has a speed and no share of the time."""
    assert describe(counts(link_bytes=10**9, link_ms=9.0), None, 1.0) == "link 1.00 GB/s"
    assert describe(counts(link_bytes=10**9, link_ms=10.0), None, 1.0) == "link 1.00 GB/s (1% of the time)"
    assert describe(counts(hits=10), None, 1.0) == "experts 100.0% in slots"
    assert describe(counts(misses=3, cpu_experts=3, cpu_routes=4), None, 1.0) == (
        "experts 0.0% in slots, 3 on the CPU (4 routes)"
    )


def test_copies_in_the_background_make_no_time_out_of_none() -> None:
    """They run beside the others, and the times of both are counted."""
    assert describe(counts(link_bytes=10**9, link_ms=1200.0), None, 1.0) == "link 1.00 GB/s (100% of the time)"


@pytest.mark.parametrize("seconds", [0.3, 4.0, 60.0])
def test_work_in_short_pieces_is_told_of(seconds: float, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Requests of so many seconds, and as long without any: a line for every five seconds of work, of its speeds, and
    what does nothing is warned of."""
    now, engine = [100.0], Driver(TinyModel(recurrent=False)).engine
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("ftengine.scheduler.stats.time.monotonic", lambda: now[0])
    size = [0]

    def found() -> ExpertStats:
        return stats(counts(hits=100, misses=600, cpu_experts=600, link_bytes=size[0]))

    log, lines = WorkLog(engine.counters, engine.scheduler, 5.0, found), []
    for _ in range(round(600 / seconds)):
        log.go_on()
        for _ in range(10):
            now[0] += seconds / 10
            size[0] += round(20e9 * seconds / 10)
            engine.counters.tokens.generated += round(100 * seconds)
            lines.append(log.line())
        log.pause()
        now[0] += seconds
    told = [line for line in lines if line is not None]
    assert len(told) == pytest.approx(600 / max(5.0, 0.1 * seconds), rel=0.15)
    for line in told:
        assert "decode 1000.0 tok/s" in line
        assert "link 20.00 GB/s" in line
    assert "may be copied to the GPU in the background" in caplog.text


def test_the_log_tells_of_what_was_prefetched() -> None:
    """What was foretold is no hit of the cache."""
    before = counts(hits=100, misses=100, prefetched=50, foretold=25)
    now = counts(hits=400, misses=200, prefetched=250, foretold=199)
    assert describe(now, before, 1.0) == "experts 31.5% in slots, 200 prefetched (87% used)"
    now = msgspec.structs.replace(now, link_bytes=10**9, link_ms=300.0)  # their bytes, and the time of other copies
    told = "200 prefetched (87% used), link 1.00 GB/s (30% of the time without the prefetched)"
    assert describe(now, before, 1.0).endswith(told)


def test_every_number_is_documented() -> None:
    """docs/api.md against the structs that /v1/stats is made of."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _, _, documented = text.partition("## `GET /v1/stats`")
    for struct in (
        EngineStats,
        RequestCounts,
        TokenCounts,
        StepCounts,
        CacheCounts,
        ExpertStats,
        LaneCost,
        LayerCounts,
    ):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in documented, f"{struct.__name__}.{name}"
