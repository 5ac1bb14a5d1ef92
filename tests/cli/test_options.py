"""What `ft serve` is told reaches the engine's configuration, and a server in the background is told the same."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

import click
import pytest

from ftengine.api.settings import Limits
from ftengine.config import EngineConfig
from ftengine.errors import FtError
from ftlaunch.cli import main
from ftlaunch.cli.sizes import size
from ftlaunch.servers.options import ServeOptions
from tests.models import tiny
from tests.support.serving import SCRIPTED_CHECKPOINT

GIVEN = ServeOptions(
    model=str(SCRIPTED_CHECKPOINT),
    host="::1",
    port=7,
    served_model_name="a b",
    context=400,
    max_running_requests=3,
    max_output_tokens=9,
    max_prefill_length=512,
    dtype="bfloat16",
    threads=2,
    device="cuda",
    memory_ratio=0.75,
    kv_tokens=4096,
    cache_device=1 << 30,
    cache_host=0,
    cache_disk=5 * 10**9,
    moe_backend="hybrid",
    moe_cache_rate=0.125,
    moe_cpu_threads=5,
    background="id",
    leased=True,
)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch):
    """Runs `ft serve` with arguments and returns the options that it would serve."""
    served: list[ServeOptions] = []
    monkeypatch.setattr("ftlaunch.servers.serve.serve", served.append)

    def parse(arguments: list[str]) -> ServeOptions:
        assert main(["serve", *arguments]) == 0
        return served.pop()

    return parse


def test_a_background_server_is_told_the_same(parsed) -> None:
    """Every field differs from its default but the key, which is not said there, and two sizes of the cache."""
    unsaid = {"api_key", "moe_cache_size", "moe_cache_mem"}
    for field in dataclasses.fields(ServeOptions):
        assert field.name in unsaid or getattr(GIVEN, field.name) != field.default, field.name
    assert parsed(GIVEN.arguments()) == GIVEN


@pytest.mark.parametrize("other", [{"moe_cache_size": 40}, {"moe_cache_mem": 123456789}, {"moe_cache_size": 0}])
def test_so_are_the_other_sizes_of_the_cache(parsed, other: dict) -> None:
    options = dataclasses.replace(GIVEN, moe_cache_rate=None, **other)
    assert parsed(options.arguments()) == options


def test_the_key_is_not_among_the_arguments() -> None:
    assert "secret" not in " ".join(dataclasses.replace(GIVEN, api_key="secret").arguments())


def test_the_engines_configuration_has_all_of_it(ft_home: Path) -> None:
    from ftlaunch.servers import serve

    record = serve._record(GIVEN, SCRIPTED_CHECKPOINT, 7)
    engine = serve._settings(GIVEN, record, SCRIPTED_CHECKPOINT).engine
    assert engine == EngineConfig(
        model_dir=str(SCRIPTED_CHECKPOINT),
        model_name=str(SCRIPTED_CHECKPOINT),
        dtype="bfloat16",
        device="cuda",
        context=400,
        max_running_requests=3,
        kv_tokens=4096,
        prefill_chunk=512,
        threads=2,
        memory_ratio=0.75,
        cache_device=1 << 30,
        cache_host=0,
        cache_disk=5 * 10**9,
        cache_dir=str(ft_home / "cache" / "prompts"),
        moe_backend="hybrid",
        moe_cache_rate=0.125,
        moe_cpu_threads=5,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123456", 123456),
        ("800MB", 800_000_000),
        ("800m", 800_000_000),
        ("6GiB", 6 << 30),
        ("6 gib", 6 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5k", 500),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "six", "1e9", "1.GB", "5iB", "5XB", "1_000", "٣", "9" * 30, "nan", "1,5GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of bytes"):
        size(text)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--memory-ratio", "nan"),
        ("--moe-cache-rate", "NaN"),
        ("--threads", "100000"),
        ("--context", "1"),
        ("--kv-tokens", "16"),
        ("--max-running-requests", str(Limits().requests + 1)),
        ("--moe-cpu-threads", "100000"),
        ("--max-prefill-length", str(1 << 64)),
        ("--context", str(1 << 64)),
        ("--kv-tokens", str(1 << 64)),
        ("--moe-cache-size", str(1 << 64)),
        ("--moe-cache-mem", "99999999999999999999T"),
        ("--cache-device", "99999999999999999999T"),
        ("--cache-host", "-1"),
        ("--cache-disk", "a lot"),
    ],
)
def test_numbers_that_no_engine_can_be_told(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are wrong usage: nothing is started that would fail by them."""
    assert main(["serve", "--model", str(SCRIPTED_CHECKPOINT), flag, value]) == 2
    assert f"Invalid value for '{flag}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says", "advises"),
    [
        (["--context", "100000000"], "a context of 100000000 tokens was asked for, the model holds", "--context "),
        (["--kv-tokens", str(1 << 60)], f"{1 << 60} tokens of keys and values", "--kv-tokens "),
        (["--cache-device", "1"], "--cache-device is 0.0 MiB", "--cache-device "),
        (["--cache-host", "1"], "--cache-host is 0.0 MiB", "--cache-host "),
        (["--cache-disk", "1"], "--cache-disk is 0.0 MiB", "--cache-disk "),
        (["--served-model-name", " "], "the served model name is blank", "--served-model-name "),
    ],
)
def test_what_headers_tell_is_refused_before_a_port_listens(
    flags: list[str],
    says: str,
    advises: str,
    ft_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("the server is started")

    monkeypatch.setattr("ftengine.api.server.run", started)
    model = str(tiny.write("qwen3", tmp_path / "model"))
    assert main(["serve", "--model", model, "--port", "0", "--device", "cpu", *flags]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert re.search(rf"^Try: +ft serve --model \S+ {advises}", said, re.MULTILINE)


def test_the_number_of_tokens_that_is_advised_is_not_refused(
    ft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []
    model = str(tiny.write("qwen3", tmp_path / "model"))
    monkeypatch.setattr("ftengine.api.server.run", lambda settings, **_: started.append(settings.engine.kv_tokens))
    command = ["serve", "--model", model, "--port", "0", "--device", "cpu", "--kv-tokens"]
    assert main([*command, str(1 << 60)]) == 1
    advised = re.search(r"--kv-tokens (\d+)$", capsys.readouterr().err, re.MULTILINE)
    assert advised is not None
    assert main([*command, advised[1]]) == 0
    assert started == [int(advised[1])]


def test_a_launch_passes_its_budgets_on(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the server that it starts: what `ft serve` would get."""
    started: list[ServeOptions] = []

    def start(options: ServeOptions) -> None:
        started.append(options)
        raise FtError("far enough")

    monkeypatch.setattr("ftlaunch.servers.start._start", start)
    monkeypatch.setattr("ftlaunch.launch.run.obtain", lambda *_: None)
    flags = ["--cache-device", "0.5GB", "--cache-host", "4GiB", "--cache-disk", "0"]
    assert main(["launch", "claude", "--model", str(SCRIPTED_CHECKPOINT), *flags]) == 1
    (options,) = started
    assert (options.cache_device, options.cache_host, options.cache_disk) == (500_000_000, 4 << 30, 0)
    said = " ".join(options.arguments())
    assert f"--cache-device 500000000 --cache-host {4 << 30} --cache-disk 0 " in said


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all names are text")
def test_a_model_in_a_folder_whose_name_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its server could be told of nowhere, and would never find its engine's settings."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    shutil.copytree(SCRIPTED_CHECKPOINT, folder)
    assert main(["serve", str(folder)]) == 1
    expected = "its name is no UTF-8 text\nTry:   mv the model to a folder with another name\n"
    assert capsys.readouterr().err.endswith(expected)
