"""The real engine process over a real socketpair, with the tests' model as a plugin."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from ftengine import wire
from ftengine.core import FinishReason
from ftengine.scheduler.fatal import describe
from tests.scheduler.spawn import EngineProcess, tokens
from tests.scheduler.test_engine import prompt
from tests.scheduler.tiny import BOMB, PAUSE, PAUSE_SECONDS, POISON, TinyModel, write_checkpoint

END = 5.0  # seconds; the promise is one, on a machine that is not busy with other tests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(checkpoint: Path):
    with EngineProcess(checkpoint, context=256, max_running_requests=4, kv_tokens=1024) as engine:
        engine.ready = engine.start()
        yield engine
        engine.socket.close()
        assert engine.wait(PAUSE_SECONDS) < END
        assert engine.process.returncode == 0


def test_ready_tells_the_resolved_facts_with_reasons(served: EngineProcess) -> None:
    ready = served.ready
    assert isinstance(ready, wire.Ready)
    assert (ready.architecture, ready.context_length) == ("TinyRecurrentForTests", 256)
    assert (ready.max_running, ready.kv_tokens, ready.device) == (4, 1024, "cpu")
    assert ready.facts["context_length"] == {"value": 256, "reason": "asked for"}
    assert ready.facts["dtype"]["value"] == ready.dtype
    assert "4 running, " in ready.facts["state_slots"]["reason"]
    assert [ready.facts[name]["value"] for name in ("cache_host", "cache_disk")] == [0, 0]


def test_progress_never_goes_back(served: EngineProcess) -> None:
    done = [frame.done for frame in served.loading]
    assert served.loading[0].done == 0
    assert done == sorted(done)
    assert len({frame.stage for frame in served.loading}) >= 4


def test_the_same_tokens_alone_together_and_again(served: EngineProcess) -> None:
    model = TinyModel(recurrent=True)
    prompts = {f"same{index}": prompt(10 + 20 * index, seed=index) for index in range(6)}
    for name, ids in prompts.items():
        served.submit(name, ids, 12)
    together = served.collect(*prompts)
    for name, ids in prompts.items():
        expected = model.greedy(ids, 12)
        assert tokens(together[name]) == expected
        assert together[name][-1].finish is FinishReason.LENGTH
        assert served.generate(ids, 12, name=name) == expected
    assert served.stats()["tokens"]["cached"] > 0


def test_the_first_output_comes_before_the_first_token(served: EngineProcess) -> None:
    ids = prompt(60, seed=77)
    served.generate(ids, 2, name="cold")
    served.submit("warm", ids, 2)
    said = served.collect("warm")["warm"]
    assert (said[0].tokens, said[0].cached_tokens, said[0].finish) == ([], 59, None)
    assert [len(message.tokens) for message in said[1:]] == [1, 1]


def test_cancel_and_the_next_request(served: EngineProcess) -> None:
    served.submit("long", prompt(5, seed=50), 250)
    while not served.receive().tokens:
        pass
    served.send(wire.Cancel("long"), wire.Cancel("unknown"))
    said = served.collect("long")["long"]
    assert said[-1].finish is FinishReason.CANCELLED
    assert len(said) < 200
    assert served.stats()["requests"]["running"] == 0
    assert served.generate(prompt(9), 5) == TinyModel(recurrent=True).greedy(prompt(9), 5)


@pytest.mark.parametrize(("token", "says"), [(BOMB, "the bomb went off"), (POISON, "not numbers")])
def test_a_failing_request_does_not_end_the_engine(served: EngineProcess, token: int, says: str) -> None:
    served.submit("bad", [*prompt(3), token], 5)
    (failed,) = [message for message in served.collect("bad")["bad"] if isinstance(message, wire.Failed)]
    assert says in failed.message
    assert served.generate(prompt(9), 5) == TinyModel(recurrent=True).greedy(prompt(9), 5)


def test_statistics_have_the_documented_form(served: EngineProcess) -> None:
    served.generate(prompt(9), 5)
    statistics = served.stats()
    assert statistics["version"] == 2
    assert set(statistics) == {"version", "uptime_s", "requests", "tokens", "steps", "cache", "prompts", "experts"}
    steps, cache = statistics["steps"], statistics["cache"]
    assert 0 < steps["p50_ms"] <= steps["p90_ms"] <= steps["p99_ms"]
    assert cache["pages_total"] == 64
    assert cache["pages_used"] + cache["pages_cached"] + cache["pages_free"] == 64


def test_an_idle_engine_sleeps(served: EngineProcess) -> None:
    """Soon after the last work: torch's compute threads wait actively for a moment."""
    served.stats()
    spent = []
    while not spent or (spent[-1] > 0.01 and len(spent) < 20):
        before = _cpu_seconds(served.process.pid)
        time.sleep(0.5)
        spent.append(_cpu_seconds(served.process.pid) - before)
    assert spent[-1] <= 0.01, spent


def test_ctrl_c_is_not_the_engines(served: EngineProcess) -> None:
    served.process.send_signal(signal.SIGINT)
    assert served.generate(prompt(9), 5) == TinyModel(recurrent=True).greedy(prompt(9), 5)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end_by_closing(engine: EngineProcess) -> None:
    engine.socket.close()


def _end_by_shutdown(engine: EngineProcess) -> None:
    engine.send(wire.Shutdown())


def _end_by_signal(engine: EngineProcess) -> None:
    engine.process.terminate()


@pytest.mark.parametrize("end", [_end_by_closing, _end_by_signal])
def test_it_ends_while_loading(end, tmp_path: Path) -> None:
    with EngineProcess(write_checkpoint(tmp_path, load_seconds=PAUSE_SECONDS)) as engine:
        while engine.receive().stage != "reading":
            pass
        end(engine)
        assert engine.wait(PAUSE_SECONDS) < END


@pytest.mark.parametrize("end", [_end_by_closing, _end_by_shutdown, _end_by_signal])
def test_it_ends_in_the_middle_of_a_step(end, checkpoint: Path) -> None:
    with EngineProcess(checkpoint) as engine:
        assert isinstance(engine.start(), wire.Ready)
        engine.submit("running", [*prompt(5), PAUSE], 50)
        engine.receive()
        time.sleep(0.3)
        end(engine)
        assert engine.wait(PAUSE_SECONDS) < END


FATAL = [
    ({"context": 1000}, "a context of 1000 tokens was asked for, the model holds 512", "--context 512"),
    ({"plugins": "no.such.module"}, "no.such.module, named in FT_PLUGINS, cannot be imported", "FT_PLUGINS"),
    ({"model_dir": "/nowhere/at/all"}, "is not a folder", "ft list"),
    ({"json": '{"model_dir": "x", "context": 0}'}, "context is 0; it must be at least 2", ""),
]


@pytest.mark.parametrize(("options", "says", "advises"), FATAL)
def test_what_cannot_start_says_why_and_what_helps(checkpoint: Path, options: dict, says: str, advises: str) -> None:
    with EngineProcess(**{"model_dir": checkpoint, **options}) as engine:
        fatal = engine.start()
        assert isinstance(fatal, wire.Fatal), fatal
        assert says in fatal.message
        assert advises in fatal.next_step
        assert engine.process.wait(10) == 1
        assert "Traceback" not in engine.process.stderr.read()


def test_a_log_line_says_what_the_work_is(tmp_path: Path) -> None:
    with EngineProcess(write_checkpoint(tmp_path, seconds=0.02), log_seconds=0.2) as engine:
        engine.start()
        engine.generate(prompt(30), 40)
        engine.send(wire.Shutdown())
        engine.wait(PAUSE_SECONDS)
        assert engine.process.returncode == 0
        log = engine.process.stderr.read()
    speeds = [float(text) for text in re.findall(r"decode ([0-9.]+) tok/s", log)]
    assert 0 < max(speeds) <= 50  # 20 ms a token
    assert "running 1, waiting 0, KV pages" in log


def test_a_package_that_is_missing() -> None:
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    expected = wire.Fatal("the engine could not start: the Python package torch is missing", "ft doctor")
    assert describe(missing) == expected


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("libtorch_cpu.so: failed to map segment from shared object")]
)
def test_the_limit_of_addresses_is_named_where_there_is_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, step in ((resource.RLIM_INFINITY, "ft serve --context 8192"), (1 << 31, "ulimit -v unlimited")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert describe(error).next_step == step
