"""The probe in Triton's interpreter, or on a GPU: its kernels move and compute what it says it times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ftengine.experts.pinned import Pinned, Refused, pin
from ftengine.experts.pool import ExpertBank
from tests.experts.banks import bank

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native")
from ftengine.experts.probe import LaneProbe


@pytest.fixture
def banks(device: str) -> Iterator[list[ExpertBank]]:
    made = [bank("nvfp4"), bank("nvfp4", seed=1)]
    pins = [pin(one.blocks) for one in made]
    if device == "cuda" and any(isinstance(outcome, Refused) for outcome in pins):
        pytest.skip("this system does not pin memory")
    yield made
    for outcome in pins:
        if isinstance(outcome, Pinned):
            outcome.close()


@pytest.fixture
def probe(banks: list[ExpertBank], device: str) -> Iterator[LaneProbe]:
    made = LaneProbe(banks, 1, torch.float32, device)
    yield made
    made.close()


def test_counts_end_with_the_experts_that_there_are(probe: LaneProbe) -> None:
    assert probe.counts == (1, 2, 4)


def test_experts_of_both_lanes_are_different_ones_and_arrive(probe: LaneProbe, banks: list[ExpertBank]) -> None:
    assert probe.handshake() > 0  # measured once, and part of `both`
    before = probe.lane.counts()
    times = probe.both(3, 2)
    assert times.both > 0
    wanted = probe.wanted.cpu()[: probe._rounds_of(5)]
    for to_link, to_cpu in wanted:
        assert len(set(to_link[:3].tolist() + to_cpu[:2].tolist())) == 5
        assert to_link[3:].eq(-1).all()
        assert to_cpu[2:].eq(-1).all()
    last = probe._rounds_of(5) - 1
    blocks = banks[last % 2].blocks[wanted[last, 0, :3].long()]
    assert torch.equal(probe.pool.blocks[:3].cpu(), blocks)
    counts = probe.lane.counts()
    requests = counts.requests - before.requests
    assert requests >= 3 * probe._rounds_of(5)
    assert counts.routes - before.routes == counts.experts - before.experts == 2 * requests


def test_rows_of_the_cpu_are_joined(probe: LaneProbe, banks: list[ExpertBank], device: str) -> None:
    from tests.experts.test_lane import directly

    probe.out.zero_()
    probe._measure(0, 2)
    assert probe.out.any()
    probe.out.zero_()
    probe._choose(1, 0, 2)
    probe.lane.wake()
    probe._queue(1, torch.zeros(1, dtype=torch.int32, device=device), 0, True)
    ids = probe.wanted[0, 1].view(1, -1).cpu()
    weights = probe.weights.cpu()
    assert torch.equal(probe.out.cpu(), directly(banks[0], probe.mailbox.rows, ids, weights))


def test_an_error_of_the_lane_ends_the_probe(probe: LaneProbe) -> None:
    probe.mailbox.error[0] = 4
    with pytest.raises(RuntimeError, match="an expert that the layer does not have"):
        probe.cpu(1)


def test_large_experts_are_measured_in_fewer_rounds_and_little_memory(probe: LaneProbe, device: str) -> None:
    probe.block_bytes = 200 << 20
    assert probe._rounds_of(2) == 1
    assert probe._rounds_of(0) == (12 if device == "cuda" else 2)
