"""`ft ctl`: against real servers, and in its form against the engine's own structs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import click
import msgspec
import pytest

from ftengine.scheduler.expert_stats import ExpertStats, LaneCost, LayerCounts
from ftengine.scheduler.prompt_stats import AdmissionStats, PromptStats, TierStats
from ftengine.scheduler.stats import CacheCounts, EngineStats, RequestCounts, StepCounts, TokenCounts
from ftlaunch.cli import ctl, main
from ftlaunch.cli.output import fold
from ftlaunch.cli.output import value as field
from ftlaunch.servers import ServerRecord, running, start_background, stop, wait_ready
from ftlaunch.servers.ask import ask
from tests.support.serving import SCRIPTED_CHECKPOINT, scripted_environment

LAYER = LayerCounts(
    hits=1234567, misses=234567, hit_rate=0.8404, fetched=123456, kept=4567, cpu_experts=111111, cpu_routes=123456,
    admitted=2345, staged=56789, seeded=1234, prefetched=0, foretold=0, link_bytes=345 * 10**9, link_ms=98765.4,
    cpu_bytes=196 * 10**9, cpu_ms=61234.5, cpu_wait_ms=5432.1,
)  # fmt: skip
EXPERTS = ExpertStats(
    resident=False, slots=2560, pool=10240, layer_count=40, decode_steps=123456, total=LAYER, cpu_ms=61234.5,
    link_ms=98765.4,
    link_cost=LaneCost(3.2, 35.1), cpu_cost=LaneCost(8.0, 26.4), cpu_share=None, background=1.0, prefetch=0,
    layers=[LAYER] * 40,
)  # fmt: skip
AHEAD = msgspec.structs.replace(
    EXPERTS, prefetch=4, total=msgspec.structs.replace(LAYER, prefetched=200000, foretold=174000, hit_rate=0.7219)
)
PROMPTS = PromptStats(
    prompt=123456789, reused={"device": 110345678, "host": 1345678, "disk": 987654}, new=10345678, repeated=432101,
    boundaries={"prompt_end": 12345, "last_user": 1234, "system": 123, "answer_end": 12345, "token": 1},
    latest=[
        AdmissionStats("0", False, 1, 0, "", "", 0),
        AdmissionStats("8f2e11c09ab3d417", False, 123456, 123440, "device", "result_start", 123441),
        AdmissionStats("8f2e11c09ab3d417~a1b2c31234", True, 12345, 11111, "disk", "system", 11112),
        AdmissionStats("", False, 12, 0, "", "", 0),
        AdmissionStats("0123456789abcdef", False, 60001, 60000, "host", "", 60000),
    ],
    tiers=[
        TierStats("device", 536870912, 450000000, 7, 0, 123456, 0, 0, 0),
        TierStats("host", 4 << 30, 4200000000, 123, 1234, 12345, 987654321987, 123456789, 0),
        TierStats("disk", 20 * 10**9, 19999999999, 234, 2345, 1234, 1987654321987, 12345678901, 3),
    ],
)  # fmt: skip
RECORD = ServerRecord("id", 1, "127.0.0.1", 1919, "demo", "demo", None, 0.0, None, None)


def answer(experts: ExpertStats | None) -> dict:
    """Of /v1/stats, with large numbers."""
    engine = EngineStats(
        version=2,
        uptime_s=86400.0,
        requests=RequestCounts(8, 123, 45678, 1234, 56, 789),
        tokens=TokenCounts(1, 2, 3, 4),
        steps=StepCounts(12345678, 1.234, 8, 2048, 2.345, 3.456, 123.456),
        cache=CacheCounts(16, 123456, 12345, 12345),
        prompts=PROMPTS,
        experts=experts,
    )
    return {
        "version": 1,
        "uptime_seconds": 93784.5,
        "running": 8,
        "answers": {"messages": 12345, "chat": 1234, "completions": 123, "responses": 12345},
        "tokens": {"prompt": 123456789, "cached": 112345678, "output": 2345678},
        "restarts": 3,
        "engine": msgspec.to_builtins(engine),
        "facts": {"moe_backend": {"value": "hybrid", "reason": "saves 1.2 ms a token; lanes measured"}},
    }


def screen(body: dict) -> str:
    return "\n".join([fold(ctl._headline(RECORD, body)), *(field(*each) for each in ctl._values(body))])


def words(body: dict) -> str:
    return " ".join(screen(body).split())


@pytest.fixture
def home(ft_home: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in scripted_environment(ft_home).items():
        monkeypatch.setenv(name, value)
    yield ft_home
    for record in running():
        stop(record, patience=1.0)


def test_a_running_server_is_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = start_background(str(SCRIPTED_CHECKPOINT))
    wait_ready(record)
    capsys.readouterr()
    assert main(["ctl", "stats"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{record.served_name} at {record.url}, up ")
    named = [line.split("\t") for line in text.splitlines()[1:]]  # into a pipe: a line each, however long
    assert {len(columns) for columns in named} == {2}
    assert "0 running, 0 waiting, 0 finished" in dict(named)["requests"]
    assert main(["ctl", "stats", str(record.port), "--layers"]) == 0
    assert "has no cache of experts on a GPU" in capsys.readouterr().err
    assert main(["ctl", "stats", record.served_name, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["engine"]["requests"]["running"] == 0
    assert body["engine"]["experts"] is None


def test_why_there_is_no_engine(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its model was moved away and the engine has died: `ps` and `ctl stats` say what it found, and what helps."""
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(SCRIPTED_CHECKPOINT, model)
    record = start_background(str(model), leased=False)
    answer = wait_ready(record)
    model.rename(away)
    os.kill(answer["engine_pid"], signal.SIGKILL)
    why = f"restarting: the engine cannot be started again: {model}"
    capsys.readouterr()
    deadline = time.monotonic() + 60
    while main(["ps"]) != 0 or why not in capsys.readouterr().out:
        assert time.monotonic() < deadline
    while main(["ctl", "stats", str(record.port)]) != 0 or f"The engine of model: {why}" not in (
        said := capsys.readouterr().err
    ):
        assert time.monotonic() < deadline
    assert "Try: " in said


def test_no_server_has_an_empty_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["ctl", "stats", ""], ["stop", " "]):
        assert main(arguments) == 1
        assert "Error: no server has an empty name\nTry:   ft ps" in capsys.readouterr().err


def test_numbers_fit_into_80_columns() -> None:
    for experts in (EXPERTS, AHEAD, msgspec.structs.replace(EXPERTS, resident=True), None):
        lines = screen(answer(experts)).splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = words(answer(EXPERTS))
    assert "up 26h03m, its engine was started again 3 times" in text
    assert "2,560 slots for 10,240 experts of 40 layers" in text
    assert "1,469,134 in 123,456 decode steps, 84.0% hits" in text
    assert "345.0 GB in 98.8 s; n experts take 3 + 35n us" in text
    assert "strategy hybrid (saves 1.2 ms a token; lanes measured)" in text


def test_what_was_prefetched() -> None:
    text = words(answer(EXPERTS))
    assert "prefetch" not in text
    text = words(answer(AHEAD))
    assert (
        " 72.2% hits prefetch 200,000 experts copied before their layer began, 87% of them used: 11.8% of the lookups, "
        "beside the hits; at most 4 a layer link 123,456 fetched"
    ) in text
    assert "345.0 GB, 98.8 s without the prefetched; n experts take 3 + 35n us" in text
    text = words(answer(msgspec.structs.replace(EXPERTS, prefetch=8)))
    assert " prefetch no expert was copied before its layer began; at most 8 a layer link 123,456 fetched" in text
    assert "345.0 GB in 98.8 s; n experts" in text


def test_a_server_that_knows_no_prefetching() -> None:
    """Of a version before: what it counts is shown."""
    body = answer(EXPERTS)
    del body["engine"]["experts"]["prefetch"]
    for name in ("prefetched", "foretold"):
        del body["engine"]["experts"]["total"][name]
    assert list(ctl._values(body)) == list(ctl._values(answer(EXPERTS)))


def test_what_the_prompt_cache_did() -> None:
    text = words(answer(None))
    assert "reused 112,679,010 of 123,456,789 tokens of prompts: 110,345,678 from device, 1,345,678 from host" in text
    assert "; 10,345,678 new, 432,101 computed again" in text
    assert "went on 12,345 after prompt end, 12,345 after answer end, 1,234 before the last user message, " in text
    assert "message, 123 after system, 1 at any token device 7 places, 450 MB of 537 MB, 123,456 given up " in text
    assert "host 123 places and 1,234 chunks, 4.2 GB of 4.3 GB, 12,345 given up, 988 GB written, 123 MB read" in text
    assert "12 GB read, 3 damaged" in text
    assert "latest 0123456789abcdef: 60,000 of 60,001 from host, new from 60,000" in text
    assert "no session: 0 of 12, new from 0" in text
    assert "8f2e11c09ab3d417: 123,440 of 123,456 from device after result start, new from 123,441" in text
    assert " 0: 0 of 1" not in text  # the fifth


def test_resident_is_said_in_place_of_zeros(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = answer(msgspec.structs.replace(EXPERTS, resident=True))
    text = words(body)
    assert "resident: every expert has a slot" in text
    assert "lookups" not in text
    monkeypatch.setattr("ftlaunch.servers.ask.ask", lambda record, path, timeout: body)
    monkeypatch.setattr("ftlaunch.servers.running", lambda: [RECORD])
    assert main(["ctl", "stats", "--layers"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "The server of demo is resident: every expert has a slot" in output.err


HEADINGS = [
    "LAYER", "HITS", "MISS", "FETCH", "AHEAD,USED", "CPU", "CPU,ROUTES", "LINK,MB", "LINK,ms", "CPU,MB", "CPU,ms",
    "WAIT,ms",
]  # fmt: skip
# The widest that each cell can be, the usual of a day, and the first seconds.
ROWS = [
    (
        dict.fromkeys(LayerCounts.__struct_fields__, 999_400) | {"hit_rate": 0.9994, "link_bytes": 9.9994e9},
        "0 99.9% 999k 999k 999k,100% 999k 999k 9999 999k 1 999k 999k",
    ),
    (
        {"prefetched": 200_000, "foretold": 174_000},
        "1 84.0% 235k 123k 200k,87% 111k 123k 345k 99k 196k 61k 5432",
    ),
    (
        dict.fromkeys(LayerCounts.__struct_fields__, 0) | {"hit_rate": 1.0, "staged": 3, "link_bytes": 5e6},
        "2 100% 0 0 0 0 0 5 0 0 0 0",
    ),
]


@pytest.fixture
def layered(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The layers of the one server that runs, which tests may change."""
    body = answer(msgspec.structs.replace(EXPERTS, layers=[LAYER] * len(ROWS)))
    layers = body["engine"]["experts"]["layers"]
    for layer, (values, _) in zip(layers, ROWS, strict=True):
        layer.update(values)
    answers = {"/v1/stats?layers=1": body}
    monkeypatch.setattr("ftlaunch.servers.ask.ask", lambda record, path, timeout: answers[path])
    monkeypatch.setattr("ftlaunch.servers.running", lambda: [RECORD])
    return layers


def test_a_row_a_layer_into_a_pipe(layered: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ctl", "stats", "--layers"]) == 0
    text = capsys.readouterr().out
    head, *rows = text.splitlines()
    assert head.split("\t") == [name.replace(",", " ") for name in HEADINGS]
    assert [row.replace(" ", ",").split("\t") for row in rows] == [expected.split() for _, expected in ROWS]
    assert not [character for character in text if not character.isprintable() and character not in "\t\n"]


def test_a_row_a_layer_on_a_screen_of_80_columns(
    layered: list[dict], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell is folded: there are two lines of headings, and one line a layer."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["ctl", "stats", "--layers"]) == 0
    first, second, *rows = click.unstyle(capsys.readouterr().out).splitlines()
    assert max(map(len, (first, second, *rows))) <= 80
    assert first.split() == [name.partition(",")[0] for name in HEADINGS if "," in name]
    assert second.split() == [name.rpartition(",")[2] for name in HEADINGS]
    assert [row.split() for row in rows] == [expected.replace(",", " ").split() for _, expected in ROWS]


def test_a_server_that_knows_no_times_of_layers(layered: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a version before."""
    for layer in layered:
        for name in ("link_ms", "cpu_ms"):
            del layer[name]
    assert main(["ctl", "stats", "--layers"]) == 0
    rows = [row.split("\t") for row in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[8], row[10]) for row in rows] == [("-", "-")] * len(ROWS)
    assert [row[7] for row in rows] == ["9999", "345k", "5"]


def test_json_has_all_of_a_layer(layered: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ctl", "stats", "--layers", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["engine"]["experts"]["layers"]
    assert shown == layered
    assert set(shown[1]) == set(LayerCounts.__struct_fields__)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.4, "0"), (9999.4, "9999"), (9999.5, "10k"), (999_499, "999k"), (999_500, "1.0M"), (9_940_000, "9.9M"),
        (9_960_000, "10M"), (999_600_000, "1.0G"), (3e12, "3.0T"), (9.99e14, "999T"),
    ],
)  # fmt: skip
def test_a_number_in_four_characters(number: float, text: str) -> None:
    assert ctl._short(number) == text


def test_an_engine_that_is_loading() -> None:
    body = {**answer(None), "engine": None}
    assert list(ctl._values(body))[-1] == ("engine", "does not answer now")


def test_which_server_is_meant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = ServerRecord("other", 2, "127.0.0.1", 1920, "demo", "demo", None, 0.0, None, None)
    monkeypatch.setattr("ftlaunch.servers.running", lambda: [RECORD, other])
    assert main(["ctl", "stats"]) == 1
    assert "several servers run: demo (port 1919), demo (port 1920)" in capsys.readouterr().err
    assert main(["ctl", "stats", "demo"]) == 1
    assert "on the ports 1919, 1920\nTry:   ft ctl stats PORT" in capsys.readouterr().err
    assert main(["ctl", "stats", "1920"]) == 1
    assert "the server of demo at http://127.0.0.1:1920 does not answer" in capsys.readouterr().err
    assert main(["ctl", "stats", "nothing"]) == 1
    assert "no server of nothing runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [
        {"version": 1},
        {"version": 1, "tokens": 3, "restarts": 0},
        {"version": 9, "engine": "x"},
        {"version": 1, "engine": {"experts": {"layers": [1]}}},
    ],
)
@pytest.mark.parametrize("layers", [True, False])
def test_an_answer_of_another_form(
    body: dict, layers: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another program on the port, or of another version."""
    monkeypatch.setattr("ftlaunch.servers.running", lambda: [RECORD])
    monkeypatch.setattr("ftlaunch.servers.ask.ask", lambda *_: body)
    status = main(["ctl", "stats", *["--layers"] * layers])
    told = capsys.readouterr()
    if layers and "engine" not in body:
        assert (status, told.out) == (0, "")
    else:
        assert (status, told.out) == (1, "")
        assert told.err.startswith("Error: what answers at http://127.0.0.1:1919 does not tell what")
    assert "FT_DEBUG" not in told.err


def test_a_server_that_drips_is_left() -> None:
    """Each byte comes in time, the answer never does."""

    def drip() -> None:
        talk, _ = listener.accept()
        with talk, contextlib.suppress(OSError):
            talk.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not ended.wait(0.05):
                talk.sendall(b" ")

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        record = dataclasses.replace(RECORD, port=listener.getsockname()[1])
        server = threading.Thread(target=drip)
        server.start()
        began = time.monotonic()
        answered = ask(record, "/v1/stats", 0.5)
        took = time.monotonic() - began
        ended.set()
        server.join()
    assert answered is None
    assert took < 20  # of the 50 that the whole answer would take
