"""profile.json: what is read back and what is not, the fit of the lanes' costs, and the probe itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ftengine.experts.profile import (
    FILE_NAME,
    KEPT,
    LOCK_NAME,
    Key,
    LaneProfile,
    LaneTimes,
    bandwidth_ratio,
    crooked,
    fit,
    lane_profile,
    read,
    write,
)
from ftengine.experts.profile_key import words
from ftengine.experts.split import LaneCosts
from tests.experts.banks import bank
from tests.support.turns import beside_another

KEY = Key("GPU, 8 MiB", "570.1", "CPU", "avx2", 15, "nvfp4", "nvfp4", 2048, 512, "bfloat16")
TIMES = LaneTimes({1: 30.0, 2: 50.0}, 10.0, 20.0)
PROFILE = LaneProfile(KEY, "2026-01-31", 100, 6.0, TIMES, TIMES, TIMES, TIMES, 0.5, [0.5], [0])


@pytest.mark.parametrize("seed", range(20))
def test_the_line_is_numpys_least_squares(seed: int) -> None:
    random = np.random.default_rng(seed)
    times = {n: 20 + 30 * n + 3 * random.standard_normal() for n in (1, 2, 4, 8)}
    b, a = np.polyfit(list(times), list(times.values()), 1)
    assert fit(times) == pytest.approx((a, b))


def test_no_cost_is_negative() -> None:
    assert fit({1: 1.0, 2: 4.0, 4: 8.0}) == (0.0, pytest.approx((1 + 8 + 32) / 21))  # the line through nought
    assert fit({1: 9.0, 2: 8.0, 4: 4.0}) == (7.0, 0.0)
    assert fit({2: 8.0}) == (0.0, 4.0)


def test_what_was_written_is_read_for_the_same_key_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ftengine.profile")
    write(tmp_path / "new", PROFILE)
    assert read(tmp_path / "new", KEY) == PROFILE
    assert not caplog.records
    for name in Key.__struct_fields__:
        value = getattr(KEY, name)
        other = msgspec.structs.replace(KEY, **{name: value + 1 if isinstance(value, int) else f"another {value}"})
        caplog.clear()
        assert read(tmp_path / "new", other) is None
        assert f"is of another {words([name])}:" in caplog.text


def test_measurements_of_other_keys_and_other_sections_are_kept(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"version": 1, "disk": {"gb": 3}, "lanes": []}))
    others = [msgspec.structs.replace(PROFILE, key=msgspec.structs.replace(KEY, threads=n)) for n in range(KEPT + 3)]
    for other in others:
        write(tmp_path, other)
    newer = msgspec.structs.replace(others[-2], measured="2027-01-01")
    write(tmp_path, newer)
    assert read(tmp_path, newer.key) == newer
    assert read(tmp_path, others[-1].key) == others[-1]
    assert read(tmp_path, others[0].key) is None
    content = json.loads((tmp_path / FILE_NAME).read_text())
    assert len(content["lanes"]) == KEPT
    assert content["disk"] == {"gb": 3}
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, LOCK_NAME}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"version": 2, "lanes": []}', b'{"version": 1, "lanes": 7}', b"[" * 100_000,
        b'{"version": 1, "lanes": [7, {"key": {}}, {"key": {"gpu": 1}}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_left_aside_and_replaced(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert read(tmp_path, KEY) is None
    write(tmp_path, PROFILE)
    assert read(tmp_path, KEY) == PROFILE


def test_two_that_measured_at_once_are_both_kept(tmp_path: Path) -> None:
    path, another = tmp_path / FILE_NAME, msgspec.structs.replace(KEY, threads=3)
    write(tmp_path, msgspec.structs.replace(PROFILE, key=another))
    written = path.read_text()
    path.unlink()
    beside_another(tmp_path / LOCK_NAME, lambda: path.write_text(written), lambda: write(tmp_path, PROFILE))
    assert read(tmp_path, KEY) == PROFILE
    assert read(tmp_path, another) is not None


def test_a_folder_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    reason = write(tmp_path / "file", PROFILE)
    assert reason is not None
    assert f"what was measured is not kept: {reason}" in caplog.text
    assert write(tmp_path, PROFILE) is None


def test_bandwidths_and_costs_are_those_of_lanes_side_by_side() -> None:
    link, link_beside, cpu_beside = (LaneTimes({}, 0.0, b) for b in (35.0, 40.0, 30.0))
    rate = 100 / 35, 100 / 40 + 100 / 30  # bytes a microsecond, 100 an expert
    assert bandwidth_ratio(link, link_beside, cpu_beside) == pytest.approx(rate[0] / rate[1])
    assert bandwidth_ratio(LaneTimes({}, 0.0, 5.0), link_beside, cpu_beside) == 1.0
    assert bandwidth_ratio(link, LaneTimes({}, 0.0, 0.0), cpu_beside) == 1.0
    beside = msgspec.structs.replace(PROFILE, link_beside=LaneTimes({}, 1.0, 2.0), cpu_beside=LaneTimes({}, 3.0, 4.0))
    assert beside.costs == LaneCosts(1.0, 2.0, 3.0, 4.0)
    alone = msgspec.structs.replace(PROFILE, link=None, link_beside=None, cpu_beside=None)
    assert alone.costs is None
    for name in ("link", "link_beside", "cpu_beside"):
        with pytest.raises(ValueError, match="the times of a lane are missing"):
            msgspec.structs.replace(alone, **{name: TIMES})


@pytest.mark.parametrize(("over", "choice"), [(2.01, "hybrid"), (1.99, "offload")])
def test_the_published_rule(over: float, choice: str) -> None:
    """The CPU shares the work where its bandwidth is more than twice the link's; q* = m B_P / B_H."""
    found = msgspec.structs.replace(PROFILE, link=LaneTimes({}, 3.0, 20.0 * over), cpu=LaneTimes({}, 9.0, 20.0))
    assert found.cpu_over_link == pytest.approx(over)
    assert found.published_choice == choice
    assert found.bandwidth(found.cpu) == pytest.approx(100 / 20e-6)
    assert found.bandwidth(found.link, found.cpu) == pytest.approx(100 / 20e-6 * (1 + 1 / over))


def test_what_has_no_slope_has_no_bandwidth() -> None:
    flat = msgspec.structs.replace(PROFILE, cpu=LaneTimes({8: 3.0}, 3.0, 0.0))
    assert (flat.bandwidth(flat.cpu), flat.cpu_over_link, flat.published_choice) == (None, None, None)
    alone = msgspec.structs.replace(PROFILE, link=None, link_beside=None, cpu_beside=None)
    assert (alone.bandwidth(alone.link), alone.cpu_over_link, alone.published_choice) == (None, None, None)


@pytest.mark.parametrize("name", ["read_bytes_per_second", "copy_bytes_per_second"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_no_bandwidth_is_nonsense(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="is not a bandwidth"):
        msgspec.structs.replace(PROFILE, **{name: value})


@pytest.mark.parametrize("lane", ["cpu", "link_beside"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_measurement_with_what_is_no_time_is_left_aside(
    lane: str, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole one of the same file is still found."""
    write(tmp_path, PROFILE)
    write(tmp_path, msgspec.structs.replace(PROFILE, key=msgspec.structs.replace(KEY, threads=3)))
    content = json.loads((tmp_path / FILE_NAME).read_text())
    content["lanes"][0][lane]["a_us"] = value
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    assert read(tmp_path, KEY) == PROFILE
    assert f"is left aside: {value} is not a time" in caplog.text
    caplog.clear()
    assert read(tmp_path, msgspec.structs.replace(KEY, threads=3)) is None
    assert f"is left aside: {value} is not a time" in caplog.text


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    write(tmp_path / "cache", PROFILE)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_the_schema_document_names_every_field() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "profile.md").read_text()
    for kind in (LaneProfile, Key, LaneTimes):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in text or f"`key.{name}`" in text or f'"{name}"' in text, name


def test_measures_once_and_then_reads(device: str, tmp_path: Path) -> None:
    banks = [bank("nvfp4"), bank("nvfp4", seed=1)]
    for folder in (tmp_path / str(number) for number in range(5)):
        made, how = lane_profile(folder, banks, 1, torch.float32, device, readable=device == "cpu")
        if not crooked(made):  # as it may be while others compute
            break
    assert how == "measured now"
    again, how = lane_profile(folder, banks, 1, torch.float32, device, readable=device == "cpu")
    assert again == made
    assert how == f"measured on {made.measured}"
    other = lane_profile(folder, banks, 1, torch.bfloat16, device, readable=False)[1]
    assert other.startswith("measured now")
