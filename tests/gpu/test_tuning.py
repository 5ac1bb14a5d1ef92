"""Launch configurations: what is timed, what is kept, and what happens to a file that is not what it should be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from ftengine.kernels.triton import tuning

CANDIDATES = [{"BLOCK": 64, "num_warps": 4}, {"BLOCK": 128, "num_warps": 8}]


def never(config: tuning.Config) -> None:
    raise AssertionError("timed at a request")


@pytest.fixture(autouse=True)
def forget():
    yield
    tuning.use_cache(None)


def keep(folder: Path, config: object, name: str = "kernel['nvfp4', 2048]") -> None:
    (folder / "tuning.json").write_text(json.dumps({tuning._machine(): {name: config}}))


def test_the_first_candidate_stands_where_nothing_was_timed(tmp_path: Path) -> None:
    tuning.use_cache(tmp_path)
    assert tuning.choose("kernel", ("nvfp4", 2048), CANDIDATES, never) == CANDIDATES[0]
    if not torch.cuda.is_available():
        with tuning.tuning():
            assert tuning.choose("kernel", ("nvfp4", 2048), CANDIDATES, never) == CANDIDATES[0]
    assert not list(tmp_path.iterdir())


def test_what_was_chosen_for_this_machine_and_key_is_taken(tmp_path: Path) -> None:
    keep(tmp_path, CANDIDATES[1])
    tuning.use_cache(tmp_path)
    assert tuning.choose("kernel", ("nvfp4", 2048), CANDIDATES, never) == CANDIDATES[1]
    assert tuning.choose("kernel", ("nvfp4", 1024), CANDIDATES, never) == CANDIDATES[0]


@pytest.mark.parametrize("config", [{"BLOCK": 1 << 20, "num_warps": 8}, 7, None, "x"])
def test_what_is_no_candidate_is_not_launched(config: object, tmp_path: Path) -> None:
    keep(tmp_path, config)
    tuning.use_cache(tmp_path)
    assert tuning.choose("kernel", ("nvfp4", 2048), CANDIDATES, never) == CANDIDATES[0]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"x": 1}', "\xff", "[" * 100_000])
def test_a_damaged_file_is_left_aside(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tuning.json").write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        tuning.use_cache(tmp_path)
        assert tuning.choose("kernel", ("nvfp4", 2048), CANDIDATES, never) == CANDIDATES[0]
    assert len(caplog.records) == (text != '{"x": 1}')


def test_choices_of_two_processes_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_fastest` needs a GPU; what is tested here is what becomes of what it found."""
    monkeypatch.setattr(tuning, "_worth_timing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_machine", lambda: "this GPU")
    monkeypatch.setattr(tuning, "_fastest", lambda name, candidates, run: candidates[1])
    (tmp_path / "tuning.json").write_text(json.dumps({"another GPU": {"kernel[1]": CANDIDATES[0]}}))
    tuners = [tuning.Tuner(tmp_path) for _ in range(2)]
    for number, tuner in enumerate(tuners):
        tuner.enabled = True
        tuner.choose("kernel", (number,), CANDIDATES, never)
        tuner.save()
    assert json.loads((tmp_path / "tuning.json").read_text()) == {
        "another GPU": {"kernel[1]": CANDIDATES[0]},
        "this GPU": {"kernel[0]": CANDIDATES[1], "kernel[1]": CANDIDATES[1]},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["tuning.json"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()  # where a folder should be
    tuner = tuning.Tuner(tmp_path / "file" / "folder")
    tuner._chosen, tuner._changed = {"kernel[]": CANDIDATES[0]}, True
    tuner.save()
    assert "not kept" in caplog.text


@pytest.fixture
def unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA GeForce RTX 4060")


def test_timing_ends_with_its_budget_and_no_later_start_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown_gpu: None
) -> None:
    """Each kernel takes 12 of 30 seconds: the third one is the last that is timed."""
    now = 0.0

    def fastest(name: str, candidates: list[tuning.Config], run: object) -> tuning.Config:
        nonlocal now
        now += 12.0
        return candidates[1]

    monkeypatch.setattr(tuning, "_fastest", fastest)
    tuner = tuning.Tuner(tmp_path, seconds=30.0, clock=lambda: now)
    tuner.enabled = True
    chosen = [tuner.choose("kernel", (number,), CANDIDATES, never) for number in range(5)]
    assert chosen == [CANDIDATES[1]] * 3 + [CANDIDATES[0]] * 2
    tuner.save()
    later = tuning.Tuner(tmp_path, clock=lambda: now)
    later.enabled = True
    assert [later.choose("kernel", (number,), CANDIDATES, never) for number in range(5)] == chosen
    assert now == 36.0


def test_nothing_is_timed_on_a_gpu_that_was_measured_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown_gpu: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200 NVL")
    tuning.use_cache(tmp_path)
    with tuning.tuning():
        assert tuning.choose("kernel", (), CANDIDATES, never) == CANDIDATES[0]
    with tuning.listing():
        assert tuning.choose("kernel", (), CANDIDATES, never) == CANDIDATES[0]
    assert not list(tmp_path.iterdir())


def test_a_list_of_what_would_be_timed_launches_each_candidate_once_and_keeps_nothing(
    tmp_path: Path, unknown_gpu: None
) -> None:
    tuning.use_cache(tmp_path)
    launched: list[tuning.Config] = []
    with tuning.listing():
        assert tuning.choose("kernel", (), CANDIDATES, launched.append) == CANDIDATES[0]
    assert launched == CANDIDATES
    assert tuning.choose("kernel", (), CANDIDATES, never) == CANDIDATES[0]
    assert not list(tmp_path.iterdir())


def test_steps_of_similar_size_share_a_choice() -> None:
    assert [tuning.bucket(tokens) for tokens in range(1, 17)] == [1] + [8] * 7 + [16] * 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
def test_the_faster_candidate_is_found_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_worth_timing", lambda: True)
    small, large = torch.zeros(1 << 10, device="cuda"), torch.zeros(1 << 28, device="cuda")
    candidates = [{"large": True}, {"large": False}]

    def run(config: tuning.Config) -> None:
        (large if config["large"] else small).add_(1)

    tuning.use_cache(tmp_path)
    with tuning.tuning():
        assert tuning.choose("add", (), candidates, run) == {"large": False}
    tuning.use_cache(tmp_path)
    assert tuning.choose("add", (), candidates, never) == {"large": False}
