"""The bench of steps over a small model, by the interpreter where there is no GPU: it counts what was done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")
pytest.importorskip("triton", reason="there is no Triton for this system")

from ftengine.bench import gpu_options, gpu_step
from ftengine.bench.gpu_step import Case, Decoding, cases
from tests.gpu.models import load_gpu, setup, write


def test_a_case_for_each_number_of_slots_and_each_policy() -> None:
    options = gpu_options.parse(
        "gpu_step", "", ["--slots-percent", "100", "25", "0", "--policy", "aged", "lru", "--strategy", "offload"]
    )
    assert cases(options, 64) == [
        Case("resident", 64, "aged"),
        Case("offload", 16, "aged"),
        Case("offload", 16, "lru"),
        Case("cpu", 0, "aged"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("ft_home")
def test_steps_of_a_small_model(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_step, "PROMPT", 3)
    folder, where = write("mixtral", tmp_path / "model"), "interpret" if device == "cpu" else device
    few = ["--warm", "1", "--steps", "3", "--batch", "2", "--slots-percent", "50", "--threads", "1"]
    gpu_step.main(["--model", str(folder), "--device", where, "--dtype", "float32", *few])
    said = capsys.readouterr().out.splitlines()[0]
    found = re.fullmatch(
        r"(\d+) slots, hybrid, aged, 2 sequences: [\d.]+ tok/s, [\d.]+ ms a step; "
        r"experts a step: ([\d.]+) in slots, ([\d.]+) missing \(([\d.]+) fetched, ([\d.]+) on the CPU\), .*",
        said,
    )
    assert found is not None, said
    slots, _, missing, fetched, computed = (float(number) for number in found.groups())
    assert slots == 4
    assert missing == pytest.approx(fetched + computed, abs=0.11)
    assert missing > 0


@pytest.mark.usefixtures("ft_home")
def test_tokens_of_all_sequences_are_counted_and_one_that_ends_is_told(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_step, "PROMPT", 3)
    model = load_gpu(write("mixtral", tmp_path / "model"), device)
    model.prepare(setup("resident", max_running=2, context=80))
    try:
        run = Decoding(model, 2, 10)
        run.start()
        timed = run.steps(1)
        assert (timed.steps, timed.tokens) == (1, 2)
        assert "; experts" not in str(timed), "nothing is looked up"
        with pytest.raises(RuntimeError, match="a sequence ended"):
            run.steps(8)
    finally:
        model.close()
