"""Against a real server whose model takes a known time, and against what the server itself counted."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ftlaunch.cli import main
from tests.bench.conftest import STEP_SECONDS, TOKEN_SECONDS, Bench
from tests.cli.test_start_time import REPORT_MODULES
from tests.support.serving import RunningServer

LUCK = 2  # tokens of a random prompt that were sent before: more happens once in some million runs


def test_decode_is_as_fast_as_the_model(paced: RunningServer, bench: Bench) -> None:
    options = ("--prompts", "tokens", "--prompt", "50", "--output", "20", "--streams", "1,3", "--runs", "2")
    for _ in range(5):
        before = paced.stats()["tokens"]["output"]
        try:
            report = bench("decode", "--url", paced.url, *options)
            break
        except AssertionError as error:  # this process stood still for as long as the answers take
            if "did not run at the same time" not in str(error):
                raise
    one, three = report["variants"][0]["points"]
    assert (one["key"]["streams"], three["key"]["streams"]) == (1, 3)
    assert paced.stats()["tokens"]["output"] - before == (1 + 3) * 3 * (1 + 20)  # streams, runs with the warm-up
    for point in (one, three):
        [turn] = point["turns"]
        assert len(turn["tokens_per_second"]) == 2
        assert turn["output_tokens"] == [20, 20]
        streams = point["key"]["streams"]
        assert all(rate > streams / STEP_SECONDS / 40 for rate in turn["tokens_per_second"])
        assert all(rate <= 1.03 / STEP_SECONDS * streams for rate in since_asked(turn, streams))
        # Pieces that came while this process stood still are read at once.
        gaps = zip(turn["gap_median_ms"], turn["gap_max_ms"], strict=True)
        assert all(middle >= 900 * STEP_SECONDS or most > 3000 * STEP_SECONDS for middle, most in gaps)
        assert all(
            middle <= high <= most
            for middle, high, most in zip(turn["gap_median_ms"], turn["gap_p99_ms"], turn["gap_max_ms"], strict=True)
        )
        assert point["median"]["tokens_per_second"] == statistics.median(turn["tokens_per_second"])
    assert max(since_asked(three["turns"][0], 3)) > 1.2 / STEP_SECONDS
    assert report["variants"][0]["server"]["device"] == "cpu"


def since_asked(turn: dict[str, list[float]], streams: int) -> list[float]:
    """Of 20 tokens each, the first one's time included: however late they are read, no more than were computed."""
    rates = zip(turn["tokens_per_second"], turn["first_token_ms"], strict=True)
    return [streams * 20 / (first / 1e3 + 19 * streams / rate) for rate, first in rates]


def test_prefill_of_cold_and_of_known_prompts(paced: RunningServer, bench: Bench) -> None:
    before = paced.stats()["tokens"]
    options = ("--cold", "40,400", "--prefix", "600", "--new", "20", "--runs", "2", "--warmup", "0")
    points = bench("prefill", "--url", paced.url, "--prompts", "tokens", *options)["variants"][0]["points"]
    turns = [point["turns"][0] for point in points]
    assert [turn["prompt_tokens"] for turn in turns] == [[40, 40], [400, 400], [620, 620]]
    # A prompt's first token may have been another one's by chance, and with luck the second one, too.
    for turn, known in zip(turns, (0, 0, 600), strict=True):
        assert all(known <= cached <= known + LUCK for cached in turn["cached_tokens"])
    counted = paced.stats()["tokens"]["cached"] - before["cached"]
    prefixes = 2  # one a run, which no turn tells of
    assert 0 <= counted - sum(sum(turn["cached_tokens"]) for turn in turns) <= prefixes * LUCK
    for turn in turns:
        for new, first, rate in zip(
            turn["new_tokens"], turn["first_token_ms"], turn["prompt_tokens_per_second"], strict=True
        ):
            assert 1e3 * TOKEN_SECONDS * new <= first < 1e3 * TOKEN_SECONDS * new + 10_000
            assert rate == pytest.approx(1e3 * new / first)


def test_lengths_of_text_are_nearly_those_asked_for(paced: RunningServer, bench: Bench) -> None:
    options = ("--cold", "1000", "--prefix", "500", "--new", "50", "--runs", "2", "--warmup", "0")
    points = bench("prefill", "--url", f"{paced.url}/v1", *options)["variants"][0]["points"]
    cold, warm = (point["turns"][0] for point in points)
    assert all(650 < tokens < 1500 for tokens in cold["prompt_tokens"])
    assert all(cached < 10 for cached in cold["cached_tokens"])
    assert all(cached > 0.9 * 350 for cached in warm["cached_tokens"])
    assert all(20 < tokens < 120 for tokens in warm["new_tokens"])


def test_agent_reuses_what_it_sent(paced: RunningServer, bench: Bench) -> None:
    options = ("--prefix", "300", "--results", "100,20", "--output", "8", "--runs", "1", "--warmup", "1")
    points = bench("agent", "--url", paced.url, *options)["variants"][0]["points"]
    assert [point["key"]["what"] for point in points] == ["first", "+100", "+20", "again"]
    first, long, short, again = (point["median"] for point in points)
    assert first["cached_tokens"] < 100  # the words of the template before the first tool
    for before, after in ((first, long), (long, short)):
        assert after["prompt_tokens"] > before["prompt_tokens"] + 8
        assert (
            after["cached_tokens"] >= before["prompt_tokens"] - 20
        )  # all but the end, where the model begins to speak
    assert long["new_tokens"] > short["new_tokens"]
    assert again["prompt_tokens"] == short["prompt_tokens"]
    assert again["new_tokens"] == 1
    assert first["first_token_ms"] > 0.9e3 * TOKEN_SECONDS * first["new_tokens"] > 100


def test_a_pipe_gets_plain_rows(paced: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--prompts", "tokens", "--prompt", "8", "--output", "4", "--runs", "2", "--warmup", "0"]
    earlier = tmp_path / "earlier.json"
    assert main(["bench", "decode", "--url", paced.url, *options, "--json"]) == 0
    earlier.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["bench", "decode", "--url", paced.url, *options, "--against", str(earlier)]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert "streams\ttok/s\tspread\tgap ms\tp99\tmax" in lines
    assert lines[1] == f"A  {paced_name(paced)} at {paced.url} (cpu, {paced_dtype(paced)})"
    assert lines[-1].startswith("1 stream: A")
    assert all(character.isprintable() or character in "\t\n" for character in said.out)
    assert all(len(line) <= 80 for line in lines)
    assert "The earlier figures are of 20" in said.err
    assert main(["bench", "prefill", "--url", paced.url, "--against", str(earlier)]) == 1
    assert "comes from ft bench decode\nTry:   ft bench prefill --json > earlier.json" in capsys.readouterr().err


def paced_name(server: RunningServer) -> str:
    models: dict[str, Any] = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
    return models["data"][0]["id"]


def paced_dtype(server: RunningServer) -> str:
    """What the server took by itself: float32 where the processor has no bfloat16 kernels."""
    health: dict[str, Any] = httpx.get(f"{server.url}/health", trust_env=False).json()
    return health["dtype"]


def test_what_does_not_fit_is_said_before(paced: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--url", paced.url, "--cold", "999999"]) == 1
    assert "a prompt and its answer of 1000000 tokens may not fit into the server's context" in capsys.readouterr().err
    assert main(["bench", "agent", "--url", paced.url, "--prefix", "999999"]) == 1
    assert "may not fit into the server's context of" in capsys.readouterr().err
    assert main(["bench", "agent", "--url", paced.url, "--prefix", "1", "--results", "999999"]) == 1
    assert "Try:   shorter and fewer --results" in capsys.readouterr().err
    assert main(["bench", "decode", "--url", paced.url, "--streams", "256"]) == 1
    assert "the server computes at most" in capsys.readouterr().err
    context = httpx.get(f"{paced.url}/health", trust_env=False).json()["context_length"]
    options = ["--prompt", "999999", "--output", "8", "--prompts", "tokens"]
    assert main(["bench", "decode", "--url", paced.url, *options]) == 1
    assert f"Try:   --prompt {context - 8}, or a server with a longer --context" in capsys.readouterr().err


def test_no_torch_is_loaded(paced: RunningServer) -> None:
    command = ["bench", "decode", "--url", paced.url, "--prompt", "8", "--output", "2", "--runs", "1", "--warmup", "0"]
    done = subprocess.run([sys.executable, "-c", REPORT_MODULES, *command], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].strip("[]").replace('"', "").split(", "))
    assert "msgspec" in modules
    assert not modules & {"torch", "numpy", "transformers", "tokenizers", "matplotlib", "starlette"}
