"""Links as sysfs tells them: trained narrow, in a narrow slot, asleep, and not told."""

from __future__ import annotations

import pytest

from ftlaunch.machine import gpu_link, pci
from ftlaunch.machine.pci import Link

CARD, PORT = "0000:01:00.0", "0000:00:01.0"
FULL = Link(4, 16, 4, 16, 4, 16)
SPEED = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}


def sysfs(tree, now: tuple[int, int], card: tuple[int, int], slot: tuple[int, int] | None, vendor: str = "0x10de"):
    """A card below a port, as links in bus/pci/devices; pairs of generation and width."""
    port = f"sys/devices/pci0000:00/{PORT}"
    files = {f"{port}/{CARD}/vendor": vendor, f"{port}/{CARD}/class": "0x030000"}
    pairs = {f"{port}/{CARD}/current": now, f"{port}/{CARD}/max": card, **({f"{port}/max": slot} if slot else {})}
    for name, (generation, width) in pairs.items():
        files |= {f"{name}_link_speed": f"{SPEED[generation]}\n", f"{name}_link_width": f"{width}\n"}
    system = tree(files)
    bus = system.path("sys/bus/pci/devices")
    bus.mkdir(parents=True)
    (bus / CARD).symlink_to(system.path(f"{port}/{CARD}"))
    return system


LINKS = [
    # now, card, slot, verdict, best GB/s, in the mend
    ((4, 16), (4, 16), (4, 16), "ok", 31.5, ""),
    ((1, 16), (4, 16), (4, 16), "ok", 31.5, ""),  # it rests
    ((4, 8), (4, 8), (4, 16), "ok", 15.75, ""),  # made so
    ((4, 4), (4, 16), (4, 4), "warn", 7.88, "the slot has 4 lanes"),
    ((4, 4), (4, 16), (4, 16), "warn", 7.88, "seat the card anew"),
    ((3, 16), (4, 16), (3, 16), "ok", 15.76, ""),  # an older board
    ((3, 1), (4, 16), None, "warn", 1.97, "seat the card anew"),
]


@pytest.mark.parametrize(("now", "card", "slot", "verdict", "best", "mend"), LINKS)
def test_links(tree, now, card, slot, verdict: str, best: float, mend: str) -> None:
    (found,) = pci.cards(sysfs(tree, now, card, slot))
    assert (found.address, found.vendor) == (CARD, pci.NVIDIA)
    assert found.link == Link(*now, *card, *(slot or (None, None)))
    finding = pci.finding(found.link, "link", {"gpu": 0})
    assert finding.verdict == verdict
    assert finding.data["best_bytes_per_second"] == pytest.approx(best * 1e9, rel=0.01)
    assert mend in finding.mend
    assert ("rests" in finding.value) == (now[0] < card[0])


def test_what_is_no_link(tree) -> None:
    """A card in deep sleep answers all ones, which the kernel shows as 63 lanes."""
    system = sysfs(tree, (4, 63), (4, 16), (4, 16))
    assert pci.cards(system)[0].link is None


def test_a_machine_without_cards(tree) -> None:
    assert pci.cards(tree({})) == []


def test_other_cards_are_told_apart(tree) -> None:
    (card,) = pci.cards(sysfs(tree, (4, 16), (4, 16), None, vendor="0x1002"))
    assert card.vendor != pci.NVIDIA


COPIES = [
    (27e9, FULL, "ok"),
    (12e9, FULL, "warn"),  # something else takes the link, or memory
    (6.5e9, Link(4, 4, 4, 16, 4, 4), "ok"),  # as fast as these four lanes; their number is another finding
    (3e9, Link(1, 16, 4, 16, 4, 16), "warn"),  # it does not wake up
    (12.8e9, Link(3, 16, 4, 16, 3, 16), "ok"),
    (12e9, None, "ok"),
]


@pytest.mark.parametrize(("measured", "link", "verdict"), COPIES)
def test_a_copy_is_judged_by_the_link(measured: float, link: Link | None, verdict: str) -> None:
    finding = gpu_link.judged(measured, link)
    assert finding.verdict == verdict
    assert bool(finding.cost) == (verdict == "warn")
    assert finding.data["bytes_per_second"] == measured
