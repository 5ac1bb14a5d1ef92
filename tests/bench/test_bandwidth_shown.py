"""What `ft bench bw` prints of a measurement with a GPU, against the numbers that it is made of."""

from __future__ import annotations

import re

import pytest

from ftengine.experts.profile import Key, LaneProfile, LaneTimes
from ftlaunch.bench.bandwidth import Result
from ftlaunch.bench.bandwidth_table import as_json, heading, notes, rows
from ftlaunch.cli.output import fold

KEY = Key("NVIDIA H200, 143771 MiB", "570.86.10", "Intel(R) Xeon(R) Platinum 8480C with a very long name, indeed",
          "avx512_bf16", 15, "nvfp4", "fp8-block", 2048, 512, "bfloat16")  # fmt: skip
PROFILE = LaneProfile(
    KEY, "2026-01-31", 1_777_664, 14.25,
    cpu=LaneTimes({1: 43.0, 2: 60.0, 4: 94.0, 8: 164.0}, 25.7, 17.3),
    link=LaneTimes({1: 38.0, 2: 72.8, 4: 142.5, 8: 282.0}, 3.1, 34.86),
    cpu_beside=LaneTimes({1: 52.0, 2: 80.0, 4: 142.0}, 21.0, 30.1),
    link_beside=LaneTimes({1: 40.0, 2: 75.0, 4: 146.0}, 4.0, 35.5),
    ratio=0.4593, q=[0.459 * m for m in range(1, 9)], fetched=[1, 1, 1, 2, 2, 3, 3, 4],
    read_bytes_per_second=112e9, copy_bytes_per_second=53e9,
)  # fmt: skip


def lines(profile: LaneProfile = PROFILE, missing: str = "") -> list[str]:
    result = Result(profile, now=False)
    columns, table = rows(profile)
    widths = [max(map(len, column)) for column in zip(columns, *table, strict=True)]
    drawn = [" ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (columns, *table)]
    said = (map(fold, heading("a model with a name", result)), drawn, map(fold, notes(result, missing)))
    return [line for texts in said for text in texts for line in text.splitlines()]


def test_it_stays_within_80_columns_and_has_no_control_codes() -> None:
    for line in lines():
        assert len(line) <= 80, line
        assert line.isprintable()


def test_rates_are_bytes_by_time() -> None:
    columns, table = rows(PROFILE)
    assert columns == ["experts", "link us", "GB/s", "CPU us", "GB/s", "both: link us", "CPU us", "GB/s"]
    mb = 1.777664
    for row, n, link, cpu in zip(
        table, (1, 2, 4, 8), (38.0, 72.8, 142.5, 282.0), (43.0, 60.0, 94.0, 164.0), strict=True
    ):
        assert row[:5] == [
            str(n),
            f"{link:.1f}",
            f"{n * mb / link * 1e3:.1f}",
            f"{cpu:.1f}",
            f"{n * mb / cpu * 1e3:.1f}",
        ]
    assert table[0][5:] == ["40.0", "52.0", f"{mb / 40 * 1e3 + mb / 52 * 1e3:.1f}"]
    assert table[3][5:] == ["-", "-", "-"]  # not measured with so few experts


def test_the_published_rule_is_shown_beside_what_ft_does() -> None:
    text = "\n".join(lines())
    assert "link: 3.1 + 34.9 n us" in text
    assert "96% of a pinned copy, 53.0 GB/s" in " ".join(text.split())
    assert re.search(r"B_P / B_H: 51\.0 GB/s / 109 GB/s = 0\.46", text)
    assert "the CPU has 2.02 times the link's bandwidth, over 2.0: hybrid" in " ".join(text.split())
    tail = text.splitlines()[-3:]
    assert tail[0].split()[3:] == [str(m) for m in range(1, 9)]
    assert tail[1].split()[-8:] == [f"{0.459 * m:.1f}" for m in range(1, 9)]
    assert tail[2].split()[3:] == ["1", "1", "1", "2", "2", "3", "3", "4"]


def test_more_than_there_is_was_disturbed() -> None:
    """A share of over 100 % is no figure to print: bandwidth was measured while others took their part."""
    best = PROFILE.bandwidth(PROFILE.cpu)
    assert best is not None
    alone = LaneProfile(KEY, "2026-01-31", 1_777_664, 0.0, PROFILE.cpu, read_bytes_per_second=best / 2.3)
    text = " ".join("\n".join(lines(alone, "no GPU")).split())
    assert "more than what all threads read, 44.7 GB/s: other programs read meanwhile, --fresh measures again" in text
    assert "%" not in text


@pytest.mark.parametrize(("missing", "refused"), [("no NVIDIA driver is installed", ""), ("", "pinning was refused")])
def test_a_link_that_is_missing_is_named(missing: str, refused: str) -> None:
    alone = LaneProfile(KEY, "2026-01-31", 1_777_664, 0.0, PROFILE.cpu)
    text = notes(Result(alone, True, "", refused), missing)
    assert text[0] == f"link: not measured, {missing or refused}"
    assert rows(alone)[0] == ["experts", "CPU us", "GB/s"]
    data = as_json("x", [Result(alone, True, "", refused)], missing, {})
    assert (data["link_missing"], data["lanes"][0]["link_missing"]) == (missing or None, refused or None)
    assert data["lanes"][0]["rule"] == {"cpu_over_link": None, "threshold": 2.0, "recommended": None}
