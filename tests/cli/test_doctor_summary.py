"""The last line of `ft doctor`, and `not_known` of its JSON: of what was not looked at nothing is said to be right."""

from __future__ import annotations

import pytest

from ftlaunch.cli import findings
from ftlaunch.machine.probe import BY_NAME
from ftlaunch.machine.verdict import Finding, Verdict


def ended(name: str, verdict: Verdict = "note") -> Finding:
    """What stands in for that probe's findings."""
    return BY_NAME[name].unknown("no answer within 0.9 s", verdict, "ft doctor")


FINE = Finding("memory.size", "size", "24 GiB", data={"usable": 1})
SLOW, BROKEN = FINE.but("warn", "speed", "do this"), FINE.but("bad", "all of it", "do that")
CASES = [
    ([FINE], [], "Nothing wrong was found."),
    ([FINE, ended("gpu", "warn")], ["gpu"], "Nothing wrong was found; not known: the GPU."),
    (
        [ended("disk"), ended("disk_read"), FINE, ended("gpu")],
        ["disk", "disk_read", "gpu"],
        "Nothing wrong was found; not known: the disk, reading the disk, the GPU.",
    ),
    ([SLOW, ended("catalogue"), SLOW], ["catalogue"], "2 things costing speed; not known: the catalogue."),
    (
        [SLOW, BROKEN, ended("gpu", "bad")],
        ["gpu"],
        "2 things not working, 1 thing costing speed; not known: the GPU.",
    ),
    ([BROKEN, SLOW], [], "1 thing not working, 1 thing costing speed."),
]


@pytest.mark.parametrize(("found", "missing", "text"), CASES)
def test_summary(found: list[Finding], missing: list[str], text: str) -> None:
    assert findings.summary(found) == text
    document = findings.report(found, quick=True, seconds=1.0)
    assert document["not_known"] == missing


def test_a_driver_that_hangs_is_no_thing_that_costs_speed_yet_a_warning() -> None:
    """By the exit status of warnings: a script that looks at that alone has to look again."""
    document = findings.report([FINE, ended("gpu", "warn")], quick=True, seconds=1.0)
    assert (document["verdict"], document["exit_status"]) == ("warn", 3)
