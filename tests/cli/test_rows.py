"""Each command as typed: arguments, exit status, what is said where. In an empty FT_HOME."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftlaunch.cli import main

ROWS = [
    # arguments, status, on stdout, on stderr
    ([], 2, "", "Usage: ft"),
    (["--help"], 0, "ft launch claude --model demo", ""),
    (["-h"], 0, "Commands:", ""),
    (["--version"], 0, "ft ", ""),
    (["version"], 0, "Python", ""),
    (["nothing"], 2, "", "No such command 'nothing'"),
    (["doctor", "extra"], 2, "", "unexpected extra argument"),
    (["doctor", "--model", "unknown"], 1, "", "Error: no model is called unknown"),
    (["doctor", "--model", "demo"], 1, "", "Error: the model demo is not in the store yet\nTry:   ft pull demo\n"),
    (["list"], 0, "", "The store is empty. Fetch a first model: ft pull demo"),
    (["list", "--json"], 0, "[]", ""),
    (["list", "extra"], 2, "", "unexpected extra argument"),
    (["show"], 2, "", "Missing argument"),
    (["show", "unknown"], 1, "", "Error: no model is called unknown"),
    (["show", "demo"], 1, "", "Error: the model demo is not on this machine\nTry:   ft pull demo\n"),
    (["show", "./missing"], 1, "", "Error: there is no directory or file ./missing\nTry:   ft list\n"),
    (["show", "org/name"], 1, "", "Error: the model org/name is not on this machine\nTry:   ft pull org/name\n"),
    (["verify"], 0, "", "The store is empty. Fetch a first model: ft pull demo"),
    (["verify", "--json"], 0, "[]", ""),
    (["verify", "unknown"], 1, "", "Error: no model is called unknown"),
    (["rm"], 2, "", "Missing argument 'NAME'"),
    (["rm", "unknown", "--yes"], 1, "", "Error: no model is called unknown"),
    (["rm", "org/name", "--yes"], 1, "", "Error: the store does not hold org/name\nTry:   ft list\n"),
    (["cache"], 0, "", "Nothing is kept in "),
    (["cache", "show", "--json"], 0, '"prompts": []', ""),
    (["cache", "clear", "--yes"], 0, "Nothing is kept in ", ""),
    (["cache", "--model", "demo"], 0, "", "Nothing is kept of demo in "),
    (["cache", "purge"], 2, "", "'purge' is not one of 'show', 'clear'"),
    (["ps"], 0, "", "No server runs. Start one: ft serve --model demo"),
    (["ps", "--json"], 0, "[]", ""),
    (["ctl", "stats"], 1, "", "Error: no server runs\nTry:   ft serve --model demo\n"),
    (["ctl", "stats", "demo"], 1, "", "Error: no server of demo runs (running: none)\nTry:   ft ps\n"),
    (["ctl", "--help"], 0, "stats", ""),
    (["stop"], 0, "", "No server runs."),
    (["stop", "--all"], 0, "", "No server runs."),
    (["stop", "--json"], 0, "[]", "No server runs."),
    (["stop", "demo"], 1, "", "Error: no server of demo runs (running: none)\nTry:   ft ps\n"),
    (["stop", "demo", "--all"], 2, "", "not both"),
    (["pull"], 2, "", "Missing argument 'MODEL'"),
    (["pull", "unknown"], 1, "", "Error: no model is called unknown\nTry:   ft list, ft pull demo, "),
    (["pull", "./here"], 1, "", "Error: there is no directory or GGUF file ./here"),
    (["pull", "a//b"], 1, "", "Error: no model is called a//b"),
    (["pull", "demo", "--to", "x"], 1, "", "Error: demo is made on this machine, for the store only"),
    (
        ["serve", "--model", "org/name"],
        1,
        "",
        "Error: the model org/name is not in the store yet\nTry:   ft pull org/name",
    ),
    (["serve"], 2, "", "no model is named: ft serve NAME"),
    (["serve", "one", "--model", "two"], 2, "", "the model is given twice"),
    (["serve", "--model", "demo"], 1, "", "Error: the model demo is not in the store yet\nTry:   ft pull demo\n"),
    (["serve", "--model", "./missing"], 1, "", "Error: there is no directory ./missing\n"),
    (["serve", "--model", "demo", "--port", "70000"], 2, "", "--port"),
    (["serve", "--model", "demo", "--port", "x"], 2, "", "--port"),
    (["serve", "--model", "demo", "--context", "0"], 2, "", "--context"),
    (["serve", "--model", "demo", "--max-running-requests", "-1"], 2, "", "--max-running-requests"),
    (["serve", "--model", "demo", "--dtype", "int3"], 2, "", "--dtype"),
    (["serve", "--model", "demo", "--device", "rocm"], 2, "", "--device"),
    (["serve", "--model", "demo", "--device", "interpret"], 2, "", "--device"),
    (["serve", "--model", "demo", "--moe-backend", "gpu"], 2, "", "--moe-backend"),
    (["serve", "--model", "demo", "--memory-ratio", "1.5"], 2, "", "--memory-ratio"),
    (["serve", "--model", "demo", "--moe-cache-size", "-1"], 2, "", "--moe-cache-size"),
    (["serve", "--model", "demo", "--moe-cache-rate", "2"], 2, "", "--moe-cache-rate"),
    (["serve", "--model", "demo", "--moe-cache-mem", "6 gigs"], 2, "", "'6 gigs' is not a number of bytes such as"),
    (["serve", "--model", "demo", "--cache-device", "-3"], 2, "", "--cache-device"),
    (["serve", "--model", "demo", "--cache-host", "4 gigs"], 2, "", "'4 gigs' is not a number of bytes such as"),
    (["bench", "bw", "--dtype", "int3"], 2, "", "'int3' is no number format; there are f32, f16, bf16,"),
    (["bench", "bw", "--dtype", "nvfp4,"], 2, "", "'' is no number format"),
    (["bench", "bw", "--threads", "0"], 2, "", "--threads"),
    (["bench", "bw", "--model", "unknown"], 1, "", "Error: no model is called unknown"),
    (["bench", "bw", "--model", "demo"], 1, "", "Error: the model demo is not in the store yet\nTry:   ft pull demo\n"),
    (["launch", "claude", "--cache-disk", "-1"], 2, "", "Invalid value for '--cache-disk'"),
    (["serve", "--model", "demo", "--max-prefill-length", "0"], 2, "", "--max-prefill-length"),
    (["serve", "--model", "demo", "--kv-tokens", "1"], 2, "", "--kv-tokens"),
    (
        ["serve", "--model", "demo", "--moe-cache-size", "5", "--moe-cache-mem", "6GiB"],
        2,
        "",
        "--moe-cache-size and --moe-cache-mem say the same in different ways: give one of them",
    ),
    *[
        ([name, "--help"], 0, "Usage: ft " + name, "")
        for name in ("pull", "list", "show", "verify", "rm", "serve", "ps", "stop", "version", "launch", "doctor")
    ],
]


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"), ROWS, ids=[" ".join(row[0]) or "(none)" for row in ROWS]
)
def test_row(
    arguments: list[str], status: int, out: str, err: str, ft_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    said = capsys.readouterr()
    assert out in said.out
    assert err in said.err
    assert "Traceback" not in said.err
    if status:
        assert said.out == ""
    if "--json" in arguments and status == 0:
        json.loads(said.out)
    assert not ft_home.exists(), "a command that only looks has made files"


def test_a_server_that_needs_a_key_refuses_to_be_reachable_without(
    ft_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FT_API_KEY", raising=False)
    model = Path(__file__).parents[1] / "support" / "scripted_checkpoint"
    assert main(["serve", "--model", str(model), "--host", "0.0.0.0", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "Error: " in said
    assert "key" in said
    assert "--api-key" in said


def test_native_windows_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftlaunch.cli.app.os.name", "nt")
    assert main(["list"]) == 1
    assert "WSL2" in capsys.readouterr().err
