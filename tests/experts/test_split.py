"""The split of missing experts between link and CPU: examples worked by hand, and the best of all splits."""

from __future__ import annotations

import itertools
import math

import pytest

from ftengine.experts.split import (
    TABLES,
    Beside,
    LaneCosts,
    fastest,
    forced_share,
    split_table,
)

SERVER, LAPTOP = LaneCosts(3.0, 35.0, 8.0, 26.0), LaneCosts(3.0, 150.0, 8.0, 50.0)


@pytest.mark.parametrize(
    ("costs", "misses", "fetched"),
    [
        (SERVER, 0, 0),
        (SERVER, 1, 0),  # 34 us on the CPU, 38 over the link
        (SERVER, 2, 1),  # max(38, 34), better than 60 and 73
        (SERVER, 8, 3),  # max(108, 138); 4 would be max(143, 112)
        (LAPTOP, 3, 1),  # max(153, 108), better than 158 on the CPU alone
    ],
)
def test_by_hand(costs: LaneCosts, misses: int, fetched: int) -> None:
    assert costs.link_share(misses) == fetched


def test_no_split_is_faster_and_ties_fetch_more() -> None:
    times = (0.0, 3.0, 7.0, 20.0)
    for a_link, b_link, a_cpu, b_cpu in itertools.product(times, repeat=4):
        costs = LaneCosts(a_link, b_link, a_cpu, b_cpu)
        for misses in range(10):
            best = min(costs.layer(misses, fetched) for fetched in range(misses + 1))
            equal = [fetched for fetched in range(misses + 1) if costs.layer(misses, fetched) == best]
            assert costs.link_share(misses) == equal[-1]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 5), (0.5, 2), (0.9, 0), (1.0, 0)])
def test_forced(share: float, expected: int) -> None:
    """Half of five on the CPU is three, rounded up."""
    assert forced_share(5, share) == expected


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_costs_are_times(wrong: float) -> None:
    with pytest.raises(ValueError, match="b_cpu is"):
        LaneCosts(1.0, 1.0, 1.0, wrong)


ODD = LaneCosts(3.0, 37.0, 7.0, 22.0, link_beside=6.0, cpu_beside=10.0, pace=1.7, row=5.0, late=0.2, late_us=900.0)


@pytest.mark.parametrize("costs", [SERVER, LAPTOP, ODD], ids=["server", "laptop", "odd"])
@pytest.mark.parametrize("beside", [Beside(), Beside(12.0, 9.0, 0.3)], ids=["alone", "beside"])
def test_a_table_of_all_splits_says_what_the_formula_does(costs: LaneCosts, beside: Beside) -> None:
    times = costs.layers(20, beside)
    for misses in range(21):
        expected = [costs.layer(misses, fetched, beside) for fetched in range(misses + 1)]
        assert times[misses, : misses + 1].tolist() == pytest.approx(expected, rel=1e-12)
        assert (times[misses, misses + 1 :] == math.inf).all()
    assert fastest(costs.layers(20)).tolist() == [costs.link_share(misses) for misses in range(21)]


def test_by_hand_beside_other_work() -> None:
    """Two over the link and three on the CPU; the CPU's third has nobody beside it any more."""
    assert ODD.link(2, 3) == pytest.approx(3 + 2 * 37 + 3 * 6)
    assert ODD.link(1, 3) == pytest.approx(3 + 37 + 1.7 * 6)
    assert ODD.cpu(3, 2) == pytest.approx(7 + 3 * 22 + 3 / 1.7 * 10)
    assert ODD.cpu(3, 1, 2.0) == pytest.approx(7 + 3 * 22 + 10 + 3 * 2 * 5)
    # One in five comes 900 us later, and the GPU's own 12 us go by meanwhile.
    assert ODD.layer(1, 0, Beside(12.0)) == pytest.approx(0.8 * 29 + 0.2 * 929)
    assert ODD.layer(1, 1, Beside(12.0, 9.0)) == pytest.approx(9 + 40)


def test_the_kernels_table() -> None:
    """A row for each number of rows of a step, as long as so many rows can miss experts; zeros behind."""
    table = split_table(3, 2, lambda rows, misses: misses // rows)
    assert table.shape == (TABLES, 3, 7)
    assert table[0].tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 0, 1, 1, 2, 0, 0], [0, 0, 0, 1, 1, 1, 2]]
    assert (table == table[0]).all()
