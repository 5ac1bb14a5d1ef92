"""The start on a GPU, as a whole: the real engine process, whose tokens are those of the CPU engine in float32.

Without a GPU the engine runs the same code on Triton's interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftengine import wire
from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw.layout import Origin
from tests.gpu import models
from tests.scheduler.spawn import EngineProcess
from tests.scheduler.tiny import TinyModel, write_checkpoint

CONFIG = {"dtype": "float32", "context": 24, "page_size": 4, "max_running_requests": 2, "prefill_chunk": 16}
PROMPTS = {"one": models.prompt_of(4, seed=1), "two": models.prompt_of(6, seed=2)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    return tmp_path / "home"


def started(folder: Path, **config) -> tuple[wire.Ready, list[wire.Loading], dict[str, list[int]], str]:
    """What a process says of itself, and what it answers to both prompts at once."""
    with EngineProcess(folder, plugins="", **{**CONFIG, **config}) as engine:
        engine.socket.settimeout(240)
        ready = engine.start()
        assert isinstance(ready, wire.Ready), ready
        for name, prompt in PROMPTS.items():
            engine.submit(name, prompt, 3)
        said = engine.collect(*PROMPTS)
        assert not any(isinstance(message, wire.Failed) for messages in said.values() for message in messages), said
        tokens = {name: [token for message in messages for token in message.tokens] for name, messages in said.items()}
        engine.send(wire.Shutdown())
        engine.wait(30)
        return ready, engine.loading, tokens, engine.process.stderr.read()


CASES = [
    pytest.param("mixtral", {}, "resident", 8, marks=pytest.mark.slow),
    ("qwen3.5", {"moe_backend": "hybrid", "moe_cache_size": 5}, "hybrid", 5),
]


@pytest.mark.parametrize(("kind", "settings", "strategy", "slots"), CASES)
def test_the_engine_starts_and_answers_as_on_the_cpu(
    kind: str, settings: dict, strategy: str, slots: int, home: Path, tmp_path: Path, device: str
) -> None:
    folder = models.write(kind, tmp_path / kind)
    name = "interpret" if device == "cpu" else device
    ready, loading, tokens, log = started(folder, device=name, **settings)
    assert tokens == started(folder, device="cpu")[2]

    assert ready.device == name
    facts = ready.facts
    assert (facts["moe_backend"]["value"], facts["moe_cache_size"]["value"]) == (strategy, slots)
    assert all(fact["reason"] for fact in facts.values())
    done = [frame.done for frame in loading]
    assert done == sorted(done)
    assert f"moe_backend: {strategy} (" in log
    assert "GPU memory: " in log
    assert "start: " in log
    for stage in ("torch", "driver", "headers", "CUDA", "weights", "lanes", "graphs", "warm-up"):
        assert f"{stage} " in log.partition("start: ")[2]
    if strategy == "hybrid":
        assert json.loads((home / "cache" / "profile.json").read_text())["lanes"]


def test_an_architecture_that_knows_no_gpu_computes_on_the_cpu(home: Path, tmp_path: Path, device: str) -> None:
    """As one from a module in FT_PLUGINS may: the scheduler's own test model."""
    folder = write_checkpoint(tmp_path / "tiny")
    with EngineProcess(folder, device="interpret" if device == "cpu" else device) as engine:
        ready = engine.start()
        assert isinstance(ready, wire.Ready), ready
        assert ready.device == "cpu"
        assert ready.facts["device"]["reason"] == "TinyRecurrentForTests is computed on the CPU only"
        prompt = [token % 50 for token in models.prompt_of(9)]
        assert engine.generate(prompt, 5) == TinyModel(recurrent=True).greedy(prompt, 5)


@pytest.mark.slow
def test_weights_that_are_read_ahead(home: Path, tmp_path: Path, device: str) -> None:
    """From FTW, all of it read while torch is imported, as from safetensors, which are read afterwards."""
    folder = models.write("qwen3.5", tmp_path / "source")
    convert(folder, tmp_path / "ftw", Options(), Origin("x"))
    settings = {"device": "interpret" if device == "cpu" else device, "moe_backend": "hybrid", "moe_cache_size": 5}
    ready, loading, tokens, log = started(tmp_path / "ftw", **settings)
    done = [frame.done for frame in loading]
    assert done == sorted(done)
    assert "read while PyTorch was imported" in log
    assert ready.facts["moe_backend"]["value"] == "hybrid"
    assert tokens == started(folder, **settings)[2]
