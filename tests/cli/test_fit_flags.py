"""`ft show --fit --flags` refuses what `ft serve` refuses: a fit of flags that cannot be served would be no answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ftlaunch.cli import main
from tests.models import tiny


@pytest.fixture
def model(tmp_path: Path, ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where no GPU is looked for, in a folder whose name has to be quoted."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return str(tiny.write("qwen3", tmp_path / "a model"))


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--device cuda", "no GPU here: "),
        ("--moe-backend hybrid", "--moe-backend hybrid needs a GPU"),
        (
            "--device cpu --moe-cache-rate 0.5",
            "--moe-cache-rate needs a GPU, and no GPU is used here: --device cpu was given",
        ),
    ],
)
def test_flags_that_need_a_gpu_where_there_is_none(
    flags: str, refusal: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", model, "--fit", "--flags", flags]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"ft serve would refuse: {refusal}" in said.err
    assert f"Try:   ft show '{model}' --fit, without" in said.err


@pytest.mark.parametrize(
    ("flags", "sentence", "step"),
    [
        ("--cache-device 1", "it would hold nothing", r"--cache-device \d+(\.\d+)?[KM]iB, or --cache-device 0"),
        ("--cache-disk 1000TB", "has room for", r"--cache-disk \d+[KMG]iB, or set FT_HOME to a folder on another disk"),
        ("--cache-host 1000TB", "--cache-host is", r"--cache-host \d+[KMG]iB"),
        ("--context 100000000", "a context of 100000000 tokens was asked for", r"--context \d+"),
    ],
)
def test_refused_flags_have_serves_own_way_out(
    flags: str, sentence: str, step: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is to be typed next names the model, and the doctor says the same."""
    assert main(["show", model, "--fit", "--json", "--flags", flags]) == 4
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)["findings"]}["model.memory"]
    assert sentence in found["value"]
    assert re.fullmatch(re.escape(f"ft serve --model '{model}' ") + step, found["mend"]), found["mend"]


def test_a_word_that_is_no_flag(tmp_path: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ft serve` would take it for a model."""
    model = str(tiny.write("qwen3", tmp_path / "model"))
    assert main(["show", model, "--fit", "--flags", "--context 512 other"]) == 2
    assert "'other' is no flag of ft serve" in capsys.readouterr().err


def test_a_hub_that_is_not_there(
    ft_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ft knows of the catalogue's models by itself is an answer, too; of others there is none."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert main(["show", "qwen3-30b-a3b", "--fit", "--json"]) in (0, 2, 3, 4)
    said = capsys.readouterr()
    assert "what ft knows of qwen3-30b-a3b by itself is told instead" in said.err
    found = {each["id"]: each["data"] for each in json.loads(said.out)["findings"]}
    assert 55 < found["model.memory"]["needed"] / (1 << 30) < 60
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["show", "someone/else", "--fit"]) == 1
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
