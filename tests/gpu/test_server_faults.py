"""A real server on a real GPU: it and its engine are killed or stopped in the middle of answers, and its experts lack
room.

    python -m pytest -m slow -s tests/gpu/test_server_faults.py
    FT_TEST_ROUNDS=20 python -m pytest -m slow -s tests/gpu/test_server_faults.py -k killed

The GPU's memory is watched from here, so nothing else may take or leave more than SLACK of it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.api.sse_reader import Frame, frames
from tests.models import tiny
from tests.support.serving import SCRIPTED_CHECKPOINT, RunningServer, scripted_environment, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to give back"),
]

COMPILING = 200.0  # seconds for the first start
ROUNDS = int(os.environ.get("FT_TEST_ROUNDS", "5"))
SECONDS = 5.0  # within which everything is gone
SLACK = 6 << 30  # bytes of GPU memory: what other tests on the same GPU may take meanwhile
KV_TOKENS = 3 << 20  # 18 GiB of keys and values: their return shows
STOPS, STOPPED = 3, 30.0  # seconds that an engine is stopped
PROMPTS, TOKENS, BUDGET = 500, 8, 15.0  # prompts, tokens of an answer, seconds in which one server is asked
VOCABULARY = 8192  # the tokenizer's
LONG = [7, 300, 4000, 12, 900]
LOST_DEVICE, LOSS = "tests.support.lost_device", [5, 5]  # not imported here: it changes what computes

COMMON = ("--dtype", "float32", "--max-running-requests", "2")
ON_GPU = (
    "--device", "cuda", "--max-prefill-length", "512", "--cache-device", "16MiB", "--moe-cpu-threads", "3", *COMMON,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all servers: kernels are compiled once."""
    return tmp_path_factory.mktemp("faults")


# Each layer's experts fill more than a MiB: smaller ones share pages with other data and are not pinned.
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 96}


def checkpoint(folder: Path, **changes: object) -> Path:
    """Random weights behind the scripted model's tokenizer."""
    changes = {"vocab_size": VOCABULARY, "linear_value_head_dim": 32, "eos_token_id": 2, **EXPERTS, **changes}
    tiny.write("qwen3.5", folder, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SCRIPTED_CHECKPOINT / name, folder / name)
    return folder


@contextlib.contextmanager
def serving(
    folder: Path, home: Path, *flags: str, plugins: str = "", split: str = "online"
) -> Iterator[tuple[RunningServer, httpx.Client]]:
    # Whatever this process found where it did, the server finds too; it runs in another folder.
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    environment = {**scripted_environment(home), "FT_PLUGINS": plugins, "PYTHONPATH": path, "FT_SPLIT": split}
    with (
        serve(folder, home, *flags, environment=environment, seconds=COMPILING) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=90) as client,
    ):
        yield server, client


def body(prompt: list[int], tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def answer(client: httpx.Client, prompt: list[int], tokens: int = TOKENS) -> str:
    response = client.post("/v1/completions", json=body(prompt, tokens))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def interrupted(client: httpx.Client, pid: int, number: int) -> list[Frame]:
    """A long answer's frames; `pid` gets the signal when the third has come."""
    received: list[Frame] = []
    with client.stream("POST", "/v1/completions", json=body(LONG, 8000, stream=True)) as response:
        try:
            for frame in frames(response.iter_bytes()):
                received += [frame] if isinstance(frame, Frame) else []
                if len(received) == 3:
                    os.kill(pid, number)
        except httpx.TransportError:
            pass  # the server itself is gone
    assert len(received) >= 3
    return received


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def family(pid: int) -> list[psutil.Process]:
    one = psutil.Process(pid)
    return [one, *one.children(recursive=True)]


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def wait_gone(processes: list[psutil.Process], memory: int) -> float:
    """Until none of them runs and so much of the GPU's memory is free; how long that took."""
    begun = time.monotonic()
    while left := running(processes) or free() < memory:
        assert time.monotonic() - begun < SECONDS, f"{left}: {running(processes)}, {free() >> 20} MiB free"
        time.sleep(0.02)
    return time.monotonic() - begun


def test_killed_while_streaming(home: Path, tmp_path: Path) -> None:
    """Each round: kill -9 of the engine, after which the server answers as before; then the server ends, by SIGTERM and
    kill -9 in turn."""
    layers = ["linear_attention", *["full_attention"] * 3]
    folder = checkpoint(tmp_path / "model", head_dim=128, layer_types=layers, max_position_embeddings=16384)
    flags = (
        *ON_GPU, "--max-running-requests", "1", "--context", "9000", "--kv-tokens", str(KV_TOKENS),
        "--moe-backend", "hybrid", "--moe-cache-size", "5",
    )  # fmt: skip
    before, expected, took = free(), None, []
    for number in range(ROUNDS):
        with serving(folder, home, *flags) as (server, client):
            said = answer(client, LONG)
            expected = expected or said
            assert said == expected
            held = before - free()
            assert held > 2 * SLACK, "what is to come back would not show"
            killed = family(client.get("/health").json()["engine_pid"])
            assert interrupted(client, killed[0].pid, signal.SIGKILL)[-1].data["error"]["message"]
            assert answer(client, LONG) == expected  # waits for the next engine
            assert client.get("/health").json()["restarts"] == 1
            assert running(killed) == []
            assert before - free() < held + SLACK, "the engine that was killed left memory behind"
            everyone = family(server.pid)
            assert len(everyone) >= 2
            interrupted(client, server.pid, signal.SIGKILL if number % 2 else signal.SIGTERM)
            took.append(wait_gone(everyone, before - SLACK))
    print(f"\n{ROUNDS} engines killed, {ROUNDS} servers ended while streaming; gone after at most {max(took):.1f} s")


def test_a_device_that_is_lost_in_the_middle_of_a_step(home: Path, tmp_path: Path) -> None:
    """Who computes and who asks are told in their API's form; another engine takes over, on the same GPU."""
    flags = (*ON_GPU, "--context", "512", "--kv-tokens", "4096", "--moe-backend", "hybrid", "--moe-cache-size", "5")
    fatal = [*LONG, *LOSS]
    with serving(checkpoint(tmp_path / "model"), home, *flags, plugins=LOST_DEVICE) as (server, client):
        expected, held = answer(client, LONG), free()
        for restarts, stream in enumerate((False, True), 1):
            engine = client.get("/health").json()["engine_pid"]
            with client.stream("POST", "/v1/completions", json=body(fatal, 4, stream=stream)) as response:
                said = response.read().decode()
            assert "device-side assert" in said
            assert "Traceback" not in said
            assert response.status_code == (200 if stream else 500), "the heading of a stream is sent before"
            assert answer(client, LONG) == expected  # waits for the next engine
            health = client.get("/health").json()
            assert (health["restarts"], health["pid"]) == (restarts, server.pid)
            assert health["engine_pid"] != engine
            assert free() > held - SLACK


@pytest.mark.parametrize(("strategy", "split"), [("hybrid", "0.5"), ("offload", "online")])
def test_an_engine_that_is_stopped_goes_on_where_it_was(strategy: str, split: str, home: Path, tmp_path: Path) -> None:
    """For longer than the GPU waits for a CPU that runs, in the middle of steps and of their launches."""
    flags = (*ON_GPU, "--context", "512", "--kv-tokens", "4096", "--moe-backend", strategy, "--moe-cache-size", "5")
    with serving(checkpoint(tmp_path / "model"), home, *flags, split=split) as (_, client):
        expected, engine = answer(client, LONG, 400), client.get("/health").json()["engine_pid"]
        said, stops = [], 0
        with client.stream("POST", "/v1/completions", json=body(LONG, 400, stream=True)) as response:
            for frame in frames(response.iter_bytes()):
                if not isinstance(frame, Frame) or frame.data == "[DONE]":
                    continue
                said += [choice["text"] for choice in frame.data["choices"]]
                if len(said) > 3 and stops < STOPS:
                    stops += 1
                    os.kill(engine, signal.SIGSTOP)
                    time.sleep(STOPPED)
                    os.kill(engine, signal.SIGCONT)
        assert stops == STOPS
        assert "".join(said) == expected
        assert client.get("/health").json()["restarts"] == 0


def answers(client: httpx.Client, prompts: list[list[int]], seconds: float) -> list[str]:
    """Of as many of the prompts as can be asked in that time, two at once."""
    deadline = time.monotonic() + seconds

    def ask(prompt: list[int]) -> str | None:
        return answer(client, prompt) if time.monotonic() < deadline else None

    with ThreadPoolExecutor(2) as pool:
        return [text for text in pool.map(ask, prompts) if text is not None]


# Room for one of 64 experts, a few, none, all; of what is missing the CPU computes none, what measured costs say, half,
# all. Strategy, what it is given, FT_SPLIT.
PRESSURE = {
    "offload": (("--moe-backend", "offload", "--moe-cache-size", "1"), "online"),
    "hybrid": (("--moe-backend", "hybrid", "--moe-cache-size", "5"), "online"),
    "half": (("--moe-backend", "hybrid", "--moe-cache-size", "5"), "0.5"),
    "cpu": (("--moe-backend", "cpu"), "online"),
    "resident": (("--moe-backend", "resident"), "online"),
}


def test_greedy_answers_under_pressure_are_the_cpus(home: Path, tmp_path: Path) -> None:
    """Of 500 prompts, each strategy gets as many as it and `--device cpu`, whose answers in float32 are the right ones,
    can answer in BUDGET seconds each; together they have to give 500 answers."""
    folder, draw = checkpoint(tmp_path / "model"), random.Random(3)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(3, 40))] for _ in range(PROMPTS)]
    with serving(folder, home, "--device", "cpu", "--threads", "1", "--context", "512", *COMMON) as (_, client):
        expected = answers(client, prompts, BUDGET)
    compared = 0
    for name, (flags, split) in PRESSURE.items():
        given = (*ON_GPU, "--context", "512", "--kv-tokens", "4096", *flags)
        with serving(folder, home, *given, split=split) as (server, client):
            found = answers(client, prompts[: len(expected)], BUDGET)
            wrong = [place for place, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
            assert not wrong, f"{name}: {len(wrong)} of {len(found)} answers differ"
            counted = server.stats()["engine"]["experts"]["total"]
        assert counted["fetched"] + counted["cpu_experts"] == counted["misses"]
        assert (counted["misses"] > 0) == (name != "resident")
        assert name == "hybrid" or (counted["cpu_experts"] > 0) == (name in ("cpu", "half")), counted
        assert name != "half" or counted["fetched"] > 0
        print(f"\n{name}: {len(found)} prompts, {counted['fetched']} experts fetched, {counted['cpu_experts']} not")
        compared += len(found)
    print(f"{compared} answers of {TOKENS} tokens are those of the CPU in float32")
    assert compared >= PROMPTS
