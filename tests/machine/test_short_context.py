"""The first prompt that is predicted is one that the context has room for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ftengine.kernels import native
from ftengine.models.gpu.strategy import Choice
from ftlaunch.cli import main
from ftlaunch.machine import bundled, hits
from ftlaunch.machine.fit import Fit, read
from ftlaunch.machine.speed import CONTEXT, Machine, dense_bytes, predict, prompt_of
from tests.models import tiny

MACHINE = Machine(host=30e9, lane=30e9, device=250e9, link=12e9, threads=4)
FITS = [Fit("cpu", threads=4), Fit("cuda", strategy=Choice("resident", "of a test", {}))]


@pytest.mark.parametrize(("context", "tokens"), [(2, 1), (64, 63), (512, 511), (513, 512), (8192, 512), (0, 512)])
def test_one_token_is_left_for_the_answer(context: int, tokens: int) -> None:
    """0: of a fit whose context nobody planned."""
    assert prompt_of(Fit("cpu", context=context)) == tokens


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.device)
def test_a_prediction_is_of_what_fits(fit: Fit) -> None:
    """Its time on the CPU, and the keys and values behind which a token is decoded; other lengths are told as ever."""
    model = bundled.model("qwen3-30b-a3b")
    short, usual = (
        predict(model, Fit(**{**vars(fit), "context": context}), MACHINE, hits.expected(1.0)) for context in (64, 8192)
    )
    assert short is not None
    assert usual is not None
    assert (short.tokens, usual.tokens) == (63, CONTEXT)
    assert short.decode_terms[0].bytes == dense_bytes(model, 63)
    assert usual.decode_terms[0].bytes - short.decode_terms[0].bytes == (CONTEXT - 63) * model.demand.token
    assert short.prompts == usual.prompts
    if fit.device == "cpu":
        computing = [made.prompt_terms[0].ms.likely for made in (short, usual)]
        assert computing[0] / computing[1] == pytest.approx(63 / CONTEXT)


@pytest.mark.skipif(not native.AVAILABLE, reason="memory's bandwidth is measured with the native library")
@pytest.mark.parametrize(("flags", "tokens"), [("--context 64", 63), ("--context 1024", 512)])
def test_the_number_is_said(
    flags: str,
    tokens: int,
    tmp_path: Path,
    ft_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the sentence, in the JSON, and with the formula."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("FT_ISA", raising=False)
    if native.kernel_choice()[0] == "portable":
        pytest.skip("nothing is predicted of portable kernels")
    name = str(tiny.write("qwen3", tmp_path / "model"))
    assert main(["show", name, "--fit", "--json", "--flags", flags]) in (0, 3, 4)
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)["findings"]}["model.speed"]
    assert f", {tokens} tokens of a first prompt in " in found["value"]
    assert found["data"]["prompt_tokens"] == tokens
    dense = found["data"]["decode_terms"][0]
    assert dense["bytes"] == dense_bytes(read(Path(name)), tokens)
    assert main(["show", name, "--fit", "--explain", "--flags", flags]) in (0, 3, 4)
    out = capsys.readouterr().out
    assert re.search(rf"^{tokens} tokens\t", out, re.MULTILINE)
    assert re.search(rf"^n\ttokens of the prompt: {tokens}$", out, re.MULTILINE)
