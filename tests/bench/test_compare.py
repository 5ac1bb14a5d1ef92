"""Against data whose truth is known: drawn at random, with and without a difference, with and without drift."""

from __future__ import annotations

import random

import pytest

from ftengine.errors import FtError
from ftlaunch.bench.compare import compare_earlier, compare_turns, speed_ratio
from ftlaunch.bench.decode import p99
from ftlaunch.bench.report import Point, Report, Variant, load_report


def report(*variants: Variant) -> Report:
    return Report("decode", "0.1.0", "2026-11-30T10:00:00+00:00", "machine", {}, list(variants))


def variant(name: str, *turns: list[float], what: str = "flags") -> Variant:
    key = {"streams": 1, "prompt": 512, "output": 128}
    return Variant(name, what, {}, [Point(key, [{"tokens_per_second": turn} for turn in turns])])


def drawn(draw: random.Random, speed: float, drifts: list[float], spread: float = 0.02) -> list[list[float]]:
    return [[speed * drift * draw.gauss(1, spread) for _ in range(3)] for drift in drifts]


def test_equal_servers_rarely_differ() -> None:
    draw = random.Random(1)
    wrong = 0
    for _ in range(60):
        ends = speed_ratio(drawn(draw, 50, [1, 1]), drawn(draw, 50, [1, 1]), True, in_turns=True)
        wrong += ends[1] is None or ends[2] is None or not ends[1] <= 1 <= ends[2]
    assert wrong <= 6  # a tenth


def test_a_difference_of_ten_percent_is_found_under_drift() -> None:
    draw = random.Random(2)
    for _ in range(20):
        drifts = [draw.uniform(0.8, 1.2) for _ in range(2)]
        middle, low, high = speed_ratio(
            drawn(draw, 50, drifts, 0.004), drawn(draw, 55, drifts, 0.004), True, in_turns=True
        )
        assert low is not None
        assert high is not None
        assert low / 1.02 <= 1.1 <= high * 1.02
        assert 0.9 < middle < 1.35


def test_turns_that_disagree_are_noise() -> None:
    a, b = variant("A", [50.0, 50.1], [40.0, 40.1]), variant("B", [45.0, 45.1], [48.0, 48.1])
    [found] = compare_turns(report(a, b))
    assert found.verdict == "within noise"
    assert found.low == pytest.approx(45.05 / 50.05)
    assert found.high == pytest.approx(48.05 / 40.05)


def test_less_time_is_faster() -> None:
    middle, low, high = speed_ratio([[10.0, 10.0]], [[5.0, 5.0]], False, in_turns=True)
    assert (middle, low, high) == (2.0, 2.0, 2.0)


def test_one_sample_tells_no_spread() -> None:
    [found] = compare_turns(report(variant("A", [50.0]), variant("B", [60.0, 60.0])))
    assert (found.verdict, found.low, found.times_as_fast) == ("unknown", None, 1.2)


def test_an_earlier_run_with_the_same_flags(tmp_path) -> None:
    import json

    path = tmp_path / "earlier.json"
    earlier = report(variant("A", [99.0] * 3, what="other"), variant("B", [50.0, 51.0, 52.0]))
    path.write_text(json.dumps(earlier.as_json()), encoding="utf-8")
    loaded = load_report(path, "decode")
    assert loaded == earlier
    [found] = compare_earlier(loaded, report(variant("A", [80.0, 81.0, 82.0])))
    assert (found.first, found.second, found.verdict) == ("earlier B", "A", "faster")
    assert found.times_as_fast == pytest.approx(81 / 51)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not what ft bench decode --json prints"),
        ('{"bench": 3}', "is not what"),
        ("[" * 100_000, "is not what"),
        (
            '{"bench": "load", "ft": "", "date": "", "machine": "", "settings": {}, "variants": []}',
            "comes from ft bench",
        ),
        ('{"bench": "decode", "ft": "", "date": "", "machine": "", "settings": {}, "variants": []}', "no measurement"),
    ],
)
def test_another_file_is_refused(text: str, said: str, tmp_path) -> None:
    path = tmp_path / "earlier.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FtError, match=said):
        load_report(path, "decode")


def test_p99() -> None:
    assert p99([float(n) for n in range(1, 101)]) == 99
    assert p99([float(n) for n in range(1, 201)]) == 198
    assert p99([5.0]) == 5
