"""The measurement of both lanes with the engine's own kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from ftlaunch.machine import gpu_link, pci
from ftlaunch.machine.probe import Asked
from tests.experts.banks import bank
from tests.support import pinned_copy

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native")


def test_lanes(device: str) -> None:
    from ftengine.experts.pinned import Pinned, pin
    from ftengine.experts.probe import LaneProbe

    made = bank("nvfp4")
    outcome = pin(made.blocks)
    if device == "cuda" and not isinstance(outcome, Pinned):
        pytest.skip("this system does not pin memory")
    probe = LaneProbe([made], 1, torch.bfloat16, device)
    try:
        gather, lanes = gpu_link.of_lanes(probe, made.layout.used_bytes, 1)
    finally:
        probe.close()
        if isinstance(outcome, Pinned):
            outcome.close()
    assert (gather.id, lanes.id) == ("gpu.gather", "gpu.lanes")
    assert gather.data["experts"] == 6  # no more than the bank has
    assert gather.data["bytes_per_second"] > 0
    assert lanes.data["together_bytes_per_second"] > 0
    assert 0 < lanes.data["ratio"] <= 1


def test_rates_are_bytes_by_time() -> None:
    """Eight experts of 1.5 MB: in 100 us over the link alone, in 50 us on the CPU, side by side in 120 and 80 us."""

    class Measured:
        most = 8

        def link(self, experts: int) -> float:
            return 100.0

        def cpu(self, experts: int) -> float:
            return 50.0

        def both(self, link: int, cpu: int) -> object:
            return type("Times", (), {"link": 120.0, "cpu": 80.0})

        def handshake(self) -> float:
            return 6.0

    gather, lanes = gpu_link.of_lanes(Measured(), 1_500_000, 15)
    assert gather.data["bytes_per_second"] == pytest.approx(120e9)
    assert lanes.data["cpu_bytes_per_second"] == pytest.approx(240e9)
    assert lanes.data["together_bytes_per_second"] == pytest.approx(100e9 + 150e9)
    assert lanes.data["ratio"] == pytest.approx(120 / 250)
    assert "15 threads" in lanes.value


@pytest.mark.parametrize(
    ("link", "share", "verdict", "said"),
    [
        ((4, 16, 4, 16, 4), 0.71, "ok", ""),
        ((4, 16, 4, 16, 4), 0.69, "warn", "69% of what that link carries"),
        ((1, 16, 4, 16, 4), 0.71, "warn", "the link stays at generation 1 under load"),
        ((3, 16, 4, 16, 3), 0.71, "ok", ""),  # the slot knows no more
    ],
)
def test_what_a_slow_copy_tells(link: tuple[int, int, int, int, int], share: float, verdict: str, said: str) -> None:
    """Generation and width while it is copied, the card's most, and the slot's generation."""
    seen = pci.Link(*link)
    found = gpu_link.judged(share * seen.best, seen)
    assert found.verdict == verdict
    assert said in found.cost


def test_nothing_is_measured_without_a_gpu() -> None:
    assert list(gpu_link.probe(Asked(known={"gpu.use": {"usable": False}}))) == []
    (refused,) = gpu_link.probe(Asked(known={"gpu.use": {"usable": True, "free": 1000}}))
    assert refused.value == "not measured: there is no memory left for it"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_pinned_copy_against_torch() -> None:
    """Within 10 % of a copy of another size, timed on the host."""
    best = pinned_copy.bytes_per_second()
    assert gpu_link.pinned(gpu_link.COPY_BYTES).data["bytes_per_second"] == pytest.approx(best, rel=0.1)
