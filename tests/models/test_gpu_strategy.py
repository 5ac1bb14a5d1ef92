"""The choice of where missing experts are computed: against a simulation that draws misses and waits for lanes, and
against what was served.
"""

from __future__ import annotations

import random

import pytest

from ftengine.experts.split import LaneCosts
from ftengine.models.gpu.setup import Strategy
from ftengine.models.gpu.strategy import HIT_CURVE, Lanes, choose, hit_range, hit_rate, missing_us

LAYERS, EXPERTS, TOP_K = 40, 256, 8
# One H200, docs/performance.md: microseconds by the number of experts, of link, CPU and both, as lines through them
SERVER = Lanes(LaneCosts(3.6, 34.8, 25.7, 17.3), LaneCosts(4.3, 35.8, 20.0, 21.0), 18.9)
FOUR_THREADS = Lanes(LaneCosts(3.6, 34.8, 40.0, 41.5), LaneCosts(4.3, 35.8, 42.0, 43.0), 13.6)
LAPTOP = Lanes(LaneCosts(5, 150, 10, 40), LaneCosts(5, 170, 10, 52), 8)
SLOW_LINK = Lanes(LaneCosts(20, 900, 8, 22), LaneCosts(20, 950, 8, 23), 6)
FAST_LINK = Lanes(LaneCosts(3, 12, 25, 17), LaneCosts(3, 14, 25, 30), 18)
SLOW_BOTH = Lanes(LaneCosts(20, 900, 40, 160), LaneCosts(20, 950, 40, 200), 14)
MACHINES = [SERVER, FOUR_THREADS, LAPTOP, SLOW_LINK, FAST_LINK, SLOW_BOTH]
OTHERS = 2.26e3  # microseconds of a step on the H200 where nothing is missing
SERVED = [
    # lanes, share in slots: tokens a second by strategy. docs/performance.md, "The strategies beside each other"
    (SERVER, 0.25, {"hybrid": 257, "offload": 247, "cpu": 107}),
    (SERVER, 0.10, {"hybrid": 207, "offload": 157, "cpu": 107}),
    (FOUR_THREADS, 0.25, {"hybrid": 245, "offload": 247, "cpu": 60}),
    (FOUR_THREADS, 0.10, {"hybrid": 181, "offload": 157, "cpu": 60}),
]


def simulated(missing: float, lanes: Lanes, uneven: float = 0.0, tokens: int = 60) -> dict[Strategy, float]:
    """Microseconds a token: every expert of every layer is drawn, every division among the lanes is tried.

    uneven: how far a layer's share of misses lies from `missing`, up or down, as a part of it: misses come together.
    """
    generator = random.Random(1)
    alone, together, wait = lanes.alone, lanes.together, lanes.handshake
    total = {"offload": 0.0, "hybrid": 0.0, "cpu": LAYERS * tokens * max(wait, alone.cpu(TOP_K))}
    hybrid = []
    for misses in range(TOP_K + 1):
        times = [max(together.link(fetched), together.cpu(misses - fetched)) for fetched in range(misses + 1)]
        times[0], times[-1] = alone.cpu(misses), alone.link(misses)
        hybrid.append(max(wait, 1.1 * min(times)) if misses else 0.22 * wait)
    for _ in range(tokens * LAYERS):
        here = missing * (1 + generator.choice((uneven, -uneven)))
        misses = sum(generator.random() < here for _ in range(TOP_K))
        total["offload"] += alone.link(misses)
        total["hybrid"] += hybrid[misses]
    return {strategy: time / tokens for strategy, time in total.items()}


@pytest.mark.parametrize("lanes", MACHINES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9])
def test_auto_is_within_five_percent_of_the_best(lanes: Lanes, share: float) -> None:
    """Of a whole step; also where misses come together, and where a text hits as seldom or as often as the curve's ends
    say.
    """
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, int(share * LAYERS * EXPERTS), lanes)
    likely = simulated(1 - hit_rate(share), lanes)
    for strategy, predicted in choice.predicted.items():
        assert predicted == pytest.approx(likely[strategy], rel=0.05, abs=8.0)
    for hits in hit_range(share):
        for uneven in (0.0, min(0.6, 1 / (1 - hits) - 1)):
            costs = {name: OTHERS + cost for name, cost in simulated(1 - hits, lanes, uneven).items()}
            assert costs[choice.strategy] <= 1.05 * min(costs.values()), (hits, uneven, costs)


@pytest.mark.parametrize(("lanes", "share", "rates"), SERVED)
def test_auto_on_a_machine_that_served_all_of_them(lanes: Lanes, share: float, rates: dict[Strategy, float]) -> None:
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, int(share * LAYERS * EXPERTS), lanes)
    assert rates[choice.strategy] >= 0.95 * max(rates.values())
    for strategy, rate in rates.items():
        assert 1e6 / (OTHERS + choice.predicted[strategy]) == pytest.approx(rate, rel=0.1), strategy


def test_missing_experts_by_strategy() -> None:
    """Eight experts, all of them missing: the lines themselves; both lanes are never slower than the better one."""
    assert missing_us("resident", 8, 0.5, SERVER) == 0.0
    assert missing_us("offload", 8, 1.0, SERVER) == pytest.approx(3.6 + 8 * 34.8)
    assert missing_us("cpu", 8, 0.0, SERVER) == pytest.approx(25.7 + 8 * 17.3)
    assert missing_us("hybrid", 8, 0.0, SERVER) == pytest.approx(0.16e3 / LAYERS, rel=0.1)  # 2.42 and 2.26 ms a step
    for share in (0.05, 0.3, 0.6, 1.0):
        assert missing_us("hybrid", 8, share, SERVER) <= 18.9 + 1.1 * missing_us("offload", 8, share, SERVER)
        assert missing_us("hybrid", 8, share, SERVER) <= 1.1 * missing_us("cpu", 8, share, SERVER)


def test_what_fits_is_resident_and_what_is_asked_for_is_done() -> None:
    everything = LAYERS * EXPERTS
    assert choose("auto", LAYERS, EXPERTS, TOP_K, everything, SERVER).strategy == "resident"
    assert choose("auto", LAYERS, EXPERTS, TOP_K, everything - 1, SERVER).strategy != "resident"
    for asked in ("offload", "cpu", "hybrid"):
        choice = choose(asked, LAYERS, EXPERTS, TOP_K, everything, SERVER)
        assert (choice.strategy, choice.reason) == (asked, "asked for")


def test_the_reason_names_the_figures() -> None:
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, LAYERS * EXPERTS // 4, SERVER)
    assert "85% hits" in choice.reason
    for strategy, cost in choice.predicted.items():
        assert f"{strategy} {cost / 1e3:.2f} ms" in choice.reason


def test_without_measurements_both_lanes_are_used() -> None:
    choice = choose("auto", LAYERS, EXPERTS, TOP_K, 100, None)
    assert choice.strategy == "hybrid"
    assert "not measured" in choice.reason


def test_the_curve() -> None:
    """Through its points, never down, and never out of order."""
    for share, *hits in HIT_CURVE:
        assert hit_range(share) == pytest.approx(hits)
    assert hit_rate(0.075) == pytest.approx(0.56)
    values = [hit_range(n / 200) for n in range(201)]
    assert all(0 <= low <= likely <= high <= 1 for low, likely, high in values)
    for column in zip(*values, strict=True):
        assert list(column) == sorted(column)
