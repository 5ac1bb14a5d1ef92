"""The order in which a measurement reads experts, against what a cache of the experts read last would hold."""

from __future__ import annotations

import torch

from ftengine.experts.cycle import Cycle
from tests.experts.banks import bank


def test_all_others_come_before_one_comes_again() -> None:
    banks = [bank("nvfp4"), bank("nvfp4", experts=4)]
    cycle = Cycle(banks)
    for number, each in enumerate(banks):
        read = torch.cat([cycle.take(number, 3) for _ in range(8)]).tolist()
        for place, expert in enumerate(read[each.experts :], each.experts):
            assert set(read[place - each.experts : place]) == set(range(each.experts))
            assert read[place - each.experts] == expert


def test_more_than_a_bank_has() -> None:
    assert len(Cycle([bank("nvfp4", experts=2)]).take(0, 5)) == 5
