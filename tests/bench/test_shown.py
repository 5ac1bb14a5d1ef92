"""What people see: tables within 80 columns, drawings, and what is said about options."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ftlaunch.bench import prompts
from ftlaunch.bench.compare import compare_turns
from ftlaunch.bench.report import METRICS, Point, Report, Variant
from ftlaunch.bench.table import heading, notes, rows
from ftlaunch.cli import bench_served, main
from ftlaunch.cli.output import fold

KEYS = {
    "decode": {"streams": 128, "prompt": 512, "output": 128},
    "prefill": {"kind": "cold", "tokens": 131072},
    "load": {"page_cache": "cold"},
    "agent": {"step": 10, "what": "first"},
}
LARGE = {
    "tokens_per_second": 12345.6,
    "gap_median_ms": 1234.56,
    "gap_p99_ms": 1234.56,
    "gap_max_ms": 12345.6,
    "hit_rate": 1.0,
    "first_token_ms": 123456.7,
    "prompt_tokens": 131072.0,
    "cached_tokens": 131071.0,
    "new_tokens": 131072.0,
    "prompt_tokens_per_second": 123456.0,
    "listens_s": 12.34,
    "ready_s": 1234.56,
    "stage: weights": 1000.0,
    "stage: warm-up": 12.0,
}


def large(bench: str) -> Report:
    """Two servers and numbers as large as they come."""
    server = {"device": "cuda", "dtype": "bfloat16", "moe_backend": "hybrid", "slots": 2560, "pool": 10240}
    variants = []
    for name, factor in (("A", 1.0), ("B", 0.5)):
        turn = {key: [factor * value, 1.01 * factor * value] for key, value in LARGE.items()}
        place = {**server, "slots": int(factor * 2560)}
        variants.append(Variant(name, f"model --moe-cache-rate {factor}", place, [Point(dict(KEYS[bench]), [turn])]))
    report = Report(bench, "0.1.0", "2026-11-30T10:00:00+00:00", "Intel(R) Xeon(R) 8480C", {}, variants)
    report.comparisons = compare_turns(report)
    return report


@pytest.mark.parametrize("bench", METRICS)
def test_eighty_columns(bench: str) -> None:
    report = large(bench)
    names, lines = rows(report)
    widths = [max(len(row[n]) for row in (names, *lines)) for n in range(len(names))]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80
    assert len(lines) == 2
    text = "\n".join(map(fold, [*heading(report), *notes(report)]))
    assert all(len(line) <= 80 for line in text.splitlines())
    faster = "B is 0.50 times as fast as A" if METRICS[bench].more_is_better else "B is 2.00 times as fast as A"
    assert faster in " ".join(text.split())


@pytest.mark.parametrize("bench", ["decode", "prefill", "agent"])
def test_a_drawing(bench: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ftlaunch.bench.plot import check, draw

    path = tmp_path / "bench.png"
    check(path)
    draw([large(bench), large(bench)], path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 600)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.png"]


def test_slots_are_drawn_in_percent(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from ftlaunch.bench.plot import _decode

    axes = figure.add_subplot()
    _decode(axes, [large("decode")])
    [line] = axes.lines[:1]
    assert list(line.get_xdata()) == [12.5, 25.0]
    assert list(line.get_ydata()) == pytest.approx([0.5 * 1.005 * 12345.6, 1.005 * 12345.6])


def test_without_matplotlib_it_is_said_before_anything_is_measured(ft_home: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from ftlaunch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "decode", "--plot", "a.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    install = f"{sys.executable} -m pip install 'ftlaunch[plot]'"
    assert done.stderr == f"Error: drawing needs matplotlib, which is not installed\nTry:   {install}\n"
    command[-1] = "a.txt"
    done = subprocess.run(command, capture_output=True, text=True)
    assert "a.txt does not end in .png\nTry:   --plot a.png" in done.stderr  # first what costs nothing to mend


ROWS = [
    # arguments, status, on stderr
    (["decode"], 1, "Error: no server runs\nTry:   ft serve --model demo\n"),
    (["decode", "nothing"], 1, "no server of nothing runs"),
    (["decode", "demo", "--url", "http://127.0.0.1:1"], 2, "NAME or PORT and --url name different servers"),
    (["decode", "--url", "nonsense"], 1, "nonsense is not an address such as"),
    (["decode", "--url", "http://[::1"], 1, "is not an address such as"),
    (["decode", "--url", "http://127.0.0.1:99999"], 1, "is not an address such as"),
    (["decode", "--url", "http://127.0.0.1:1"], 1, "nothing answers at http://127.0.0.1:1 ("),
    (["decode", "--streams", "1,0"], 2, "'1,0' is not numbers from 1 to 256"),
    (["decode", "--streams", "many"], 2, "'many' is not numbers"),
    (["decode", "--flags", "--threads 1"], 2, "--flags start a server, which needs --model"),
    (["decode", "--model", "unknown"], 1, "Error: no model is called unknown"),
    (["decode", "--model", ".", "--flags", "--port 3"], 2, "--flags: --port is chosen by ft bench"),
    (["decode", "--model", ".", "--flags", "--threads 'x"], 2, "No closing quotation"),
    (["decode", "--model", ".", "--flags", "--nonsense 3"], 2, "No such option"),
    (["decode", "--against", "missing.json"], 2, "does not exist"),
    (["load"], 2, "Missing option '--model'"),
    (["agent", "--results", "5,x"], 2, "is not numbers"),
]


@pytest.mark.parametrize(("arguments", "status", "said"), ROWS)
def test_as_typed(
    arguments: list[str],
    status: int,
    said: str,
    ft_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.support.serving import SCRIPTED_CHECKPOINT

    monkeypatch.chdir(SCRIPTED_CHECKPOINT)
    assert main(["bench", *arguments]) == status
    error = capsys.readouterr().err
    assert said in " ".join(error.split()) or said in error
    assert "Traceback" not in error


def test_prompts() -> None:
    """The same seed is the same text behind another opening; the lengths of tokens are exact."""
    assert bench_served.PROMPTS == prompts.KINDS
    made = prompts.Prompts("code", 3.0)
    one, two = made.unique(100, "a"), made.unique(100, "a")
    assert isinstance(one, str)
    assert isinstance(two, str)
    assert one.split("\n", 1)[0] != two.split("\n", 1)[0]
    assert one.split("\n", 1)[1] == two.split("\n", 1)[1]
    assert abs(len(one) - 300) < 6
    drawn = prompts.Prompts("tokens", 1.0)
    for count in (1, 3, 4, 50):
        prefix = drawn.unique(count, "a")
        assert len(prefix) == count
        longer = drawn.extended(prefix, count, "b")
        assert longer[:count] == prefix
        assert len(longer) == 2 * count
