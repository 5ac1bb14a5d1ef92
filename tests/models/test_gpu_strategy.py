"""The choice of where missing experts are computed, against a simulation that draws misses and waits for lanes."""

from __future__ import annotations

import random

import pytest

from ftengine.experts.split import LaneCosts
from ftengine.models.gpu.setup import Strategy
from ftengine.models.gpu.strategy import HIT_CURVE, Lanes, choose, hit_rate

LAYERS, EXPERTS, TOP_K = 40, 256, 8
SERVER = Lanes(LaneCosts(3, 35, 8, 22), LaneCosts(3, 37, 8, 30), 6)
FOUR_THREADS = Lanes(LaneCosts(3, 35, 8, 80), LaneCosts(3, 36, 8, 90), 6)
LAPTOP = Lanes(LaneCosts(5, 150, 10, 40), LaneCosts(5, 170, 10, 52), 8)
SLOW_LINK = Lanes(LaneCosts(20, 900, 8, 22), LaneCosts(20, 950, 8, 23), 6)


def simulated(strategy: Strategy, share: float, lanes: Lanes, tokens: int = 250) -> float:
    """Microseconds a token: every expert of every layer is drawn, every division among the lanes is tried."""
    generator, total = random.Random(1), 0.0
    missing = 1.0 if strategy == "cpu" else 1 - hit_rate(share)
    for _ in range(tokens * LAYERS):
        misses = sum(generator.random() < missing for _ in range(TOP_K))
        if strategy == "offload":
            total += lanes.alone.link(misses)
        elif strategy == "cpu":
            total += lanes.handshake + lanes.alone.cpu(misses)
        else:
            times = [
                max(lanes.together.link(fetched), lanes.together.cpu(misses - fetched)) for fetched in range(misses + 1)
            ]
            times[0], times[-1] = lanes.alone.cpu(misses), lanes.alone.link(misses)
            total += lanes.handshake + min(times)
    return total / tokens


@pytest.mark.parametrize("lanes", [SERVER, FOUR_THREADS, LAPTOP, SLOW_LINK])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.25, 0.5, 0.75])
def test_auto_is_within_five_percent_of_the_best(lanes: Lanes, share: float) -> None:
    costs = {each: simulated(each, share, lanes) for each in ("offload", "cpu", "hybrid")}
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, int(share * LAYERS * EXPERTS), lanes)
    assert costs[choice.strategy] <= 1.05 * min(costs.values())
    for strategy, predicted in choice.predicted.items():
        assert predicted == pytest.approx(costs[strategy], rel=0.04, abs=2.0)


def test_what_fits_is_resident_and_what_is_asked_for_is_done() -> None:
    everything = LAYERS * EXPERTS
    assert choose("auto", LAYERS, EXPERTS, TOP_K, everything, SERVER).strategy == "resident"
    assert choose("auto", LAYERS, EXPERTS, TOP_K, everything - 1, SERVER).strategy != "resident"
    for asked in ("offload", "cpu", "hybrid"):
        choice = choose(asked, LAYERS, EXPERTS, TOP_K, everything, SERVER)
        assert (choice.strategy, choice.reason) == (asked, "asked for")


def test_the_reason_names_the_figures() -> None:
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, LAYERS * EXPERTS // 4, SERVER)
    assert "80% hits" in choice.reason
    for strategy, cost in choice.predicted.items():
        assert f"{strategy} {cost / 1e3:.2f} ms" in choice.reason


def test_without_measurements_both_lanes_are_used() -> None:
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, 100, None)
    assert choice.strategy == "hybrid"
    assert "not measured" in choice.reason


def test_hit_rates_go_through_the_points_of_the_curve() -> None:
    assert [hit_rate(share) for share, _ in HIT_CURVE] == pytest.approx([hits for _, hits in HIT_CURVE])
    assert hit_rate(0.075) == pytest.approx(0.51)
