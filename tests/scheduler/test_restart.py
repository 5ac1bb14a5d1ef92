"""Engine processes that end and begin again over one folder of kept prompts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ftengine import wire
from tests.scheduler.spawn import EngineProcess
from tests.scheduler.test_engine import prompt
from tests.scheduler.tiny import PAUSE, PAUSE_SECONDS, TinyModel, write_checkpoint

LENGTH = 1200
SETTINGS = {"context": 2048, "max_running_requests": 2, "kv_tokens": 4096, "cache_disk": 50_000_000}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


def generate(engine: EngineProcess, seed: int) -> int:
    """Tokens of a prompt of LENGTH that were reused; its answer is the model's."""
    ids = prompt(LENGTH, seed=seed)
    engine.submit("only", ids, 4)
    said = engine.collect("only")["only"]
    assert [token for message in said for token in message.tokens] == TinyModel(recurrent=True).greedy(ids, 4)
    return said[0].cached_tokens


def test_the_next_engine_begins_with_what_the_last_one_had(checkpoint: Path, tmp_path: Path) -> None:
    """Also after SIGTERM."""
    folder = tmp_path / "prompts"
    with EngineProcess(checkpoint, cache_dir=str(folder), **SETTINGS) as engine:
        engine.start()
        assert generate(engine, seed=1) == 0
        engine.process.terminate()
        assert engine.wait(5) < 4
        assert engine.process.returncode == 128 + signal.SIGTERM
    assert folder.stat().st_mode & 0o777 == 0o700
    with EngineProcess(checkpoint, cache_dir=str(folder), **SETTINGS) as engine:
        ready = engine.start()
        assert isinstance(ready, wire.Ready)
        assert ready.facts["cache_disk"] == {"value": 50_000_000, "reason": f"asked for, in {folder}"}
        assert generate(engine, seed=1) == LENGTH - 1
        prompts = engine.stats()["prompts"]
        assert prompts["reused"] == {"device": 0, "host": 0, "disk": LENGTH - 1}
        assert (prompts["prompt"], prompts["new"] + prompts["repeated"]) == (LENGTH, 1)
        (latest,) = prompts["latest"]
        assert (latest["prompt"], latest["reused"], latest["tier"]) == (LENGTH, LENGTH - 1, "disk")
        device, disk = prompts["tiers"]
        assert (device["name"], disk["name"]) == ("device", "disk")
        assert 0 < device["used"] <= device["budget"]
        assert 0 < disk["read"] <= disk["used"] <= disk["budget"] == 50_000_000


def test_what_waits_is_written_while_a_step_computes(checkpoint: Path, tmp_path: Path) -> None:
    """The end is forced: the step takes longer than anybody waits for it."""
    folder = tmp_path / "prompts"
    with EngineProcess(checkpoint, cache_dir=str(folder), **SETTINGS) as engine:
        engine.start()
        generate(engine, seed=1)
        engine.submit("long", [*prompt(5), PAUSE], 50)
        engine.receive()
        engine.send(wire.Shutdown())
        assert engine.wait(PAUSE_SECONDS) < 4
    with EngineProcess(checkpoint, cache_dir=str(folder), **SETTINGS) as engine:
        engine.start()
        assert generate(engine, seed=1) == LENGTH - 1


def test_warnings_of_a_folder_that_cannot_be_used_and_of_a_cache_without_use(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with EngineProcess(checkpoint, cache_dir=str(tmp_path / "file" / "prompts"), **SETTINGS) as engine:
        ready = engine.start()
        assert isinstance(ready, wire.Ready)
        assert ready.facts["cache_disk"] == {"value": 0, "reason": "it could not be opened; the log says why"}
        for seed in range(12):
            engine.generate(prompt(LENGTH, seed=seed), 1)
        assert engine.stats()["tokens"]["cached"] == 0
        engine.send(wire.Shutdown())
        engine.wait(5)
        log = engine.process.stderr.read()
    assert log.count("prompts are not kept on disk: ") == 1
    # Nor is anything reused on the device, since no two prompts begin alike.
    assert log.count("the prompt cache is on, and 10 prompts of 1,024 tokens and more") == 1
    assert "Traceback" not in log
