"""`ft serve` ended in every way and started again: what was whole on the disk is used, what was not is left out, and
answers stay what they were.

    python -m pytest tests/prompts/test_restart.py -m slow    # more kills, damaged and foreign files, 200 flipped bits
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ftengine.core import Boundary, BoundaryKind
from tests.models.tiny import change_config
from tests.prompts import small_models
from tests.prompts.driver import PromptEngine
from tests.prompts.edits import FIRST_PLAIN
from tests.prompts.loaded import KINDS, VOCABULARY, Load
from tests.prompts.test_soak import tiny_budgets
from tests.support.serving import SCRIPTED_CHECKPOINT, RunningServer, scripted_environment, serve

SPEAKING_VOCABULARY = 8192  # of tests/support/scripted_checkpoint
FLAGS = ("--device", "cpu", "--context", "16384", "--threads", "1", "--cache-disk", "1G")
LEAST_RESTART = 0.98


@dataclass(frozen=True)
class Said:
    text: str
    prompt: int
    cached: int


def write_model(folder: Path, seed_from: str = "qwen3_5_moe") -> Path:
    """A small real model that speaks: its weights are random, its tokenizer and template are not."""
    small_models.write(seed_from, folder, vocab_size=SPEAKING_VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(SCRIPTED_CHECKPOINT / name, folder / name)
    change_config(folder, eos_token_id=2)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("speaking") / "model")


def words(seed: int, count: int = 5000) -> str:
    choose = random.Random(seed)
    return " ".join(choose.choice(("state", "page", "token", "slot", "cache", "anchor")) for _ in range(count))


def ask(server: RunningServer, seed: int = 1) -> Said:
    body: dict[str, Any] = {
        "system": words(seed),
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    response = httpx.post(f"{server.url}/v1/messages", json=body, trust_env=False, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
    assert server.stats()["engine"]["prompts"]["latest"][-1]["reused"] == cached
    return Said("".join(block.get("text", "") for block in answer["content"]), prompt, cached)


def records(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*-*") if path.is_file() and path.name.count("-") >= 2)


def kill(server: RunningServer) -> None:
    """The front first: it would start the engine again."""
    engine = httpx.get(f"{server.url}/health", trust_env=False).json()["engine_pid"]
    for pid in (server.pid, engine):
        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def check_log(server: RunningServer) -> None:
    lines = server.log_text().splitlines()
    assert not [line for line in lines if " E " in line or "Traceback" in line]


def kill_and_start_again(model: Path, home: Path, rounds: int) -> None:
    environment = scripted_environment(home)
    told = ""
    for number in range(rounds):
        before = len(records(home))
        with serve(model, home, *FLAGS, environment=environment) as server:
            said = ask(server)
            told = told or said.text
            assert said.text == told
            ask(server, seed=100 + number)  # something new to write
            until(lambda seen=before + number % 3: len(records(home)) > seen)
            kill(server)
        check_log(server)
    with serve(model, home, *FLAGS, environment=environment) as server:
        assert ask(server).text == told
        assert not list(home.rglob(".writing-*")), "what was not whole is still there"
        check_log(server)
    with serve(model, home, *FLAGS, environment=environment) as server:
        said = ask(server)  # the one before was ended as it should be: all of the prompt is there
        assert said.text == told
        assert said.cached >= LEAST_RESTART * said.prompt
        assert server.stats()["engine"]["prompts"]["latest"][-1]["tier"] == "disk"
        check_log(server)


def test_killed_while_it_writes(model: Path, tmp_path: Path) -> None:
    kill_and_start_again(model, tmp_path / "home", 1)


@pytest.mark.slow
def test_killed_again_and_again(model: Path, tmp_path: Path) -> None:
    kill_and_start_again(model, tmp_path / "home", 12)


@pytest.mark.slow
def test_what_does_not_match_is_left_out(model: Path, tmp_path: Path) -> None:
    """Damaged files, and whole ones of other weights."""
    home = tmp_path / "home"
    with serve(model, home, *FLAGS) as server:
        first = ask(server)
    whole = records(home)
    assert whole
    assert {path.stat().st_mode & 0o777 for path in whole} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in whole} == {0o700}
    for path, damage in zip(whole, (_flip, _cut, _empty, _lengthen) * len(whole), strict=False):
        damage(path)
    with serve(model, home, *FLAGS) as server:
        again = ask(server)
        assert (again.text, again.cached) == (first.text, 0)
        assert "cut short" in server.log_text() or "damaged" in server.log_text()
        check_log(server)

    other = write_model(tmp_path / "other", "qwen3_moe")
    place = tmp_path / "other home"
    with serve(other, place, *FLAGS) as server:
        cold = ask(server)
    (folder,) = {path.parent for path in records(place)}
    for path in records(place):
        path.unlink()
    for path in records(home):  # whole again since the second server
        shutil.copyfile(path, folder / path.name)
    with serve(other, place, *FLAGS) as server:
        after = ask(server)
        assert (after.text, after.cached) == (cold.text, 0)
        assert "another model" in server.log_text()
        check_log(server)


@pytest.mark.slow
def test_another_template_is_another_cache(model: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    home = tmp_path / "home"
    with serve(changed, home, *FLAGS) as server:
        first = ask(server)
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text("utf-8") + "{#- the same prompts, but who knows -#}", "utf-8")
    with serve(changed, home, *FLAGS) as server:
        again = ask(server)
        assert (again.text, again.cached) == (first.text, 0)
        assert "another template" in server.log_text()


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip_bits(load: Load, kind: str, folder: Path, flips: int) -> None:
    """Each flip is in a file without which less of the prompt is reused: seen means that less is."""
    loaded, choose = load(kind, "float32"), random.Random(7)
    prompt = [choose.randrange(FIRST_PLAIN, VOCABULARY) for _ in range(1300)]
    boundaries = [Boundary(len(prompt), BoundaryKind.PROMPT_END)]
    kept = folder / "kept"
    tokens = _run(load, kind, kept, prompt, boundaries)[0]
    assert _run(load, kind, _copy(kept, folder / "whole"), prompt, boundaries) == (tokens, len(prompt) - 1)
    found = {path.relative_to(kept): int(path.name.split("-")[0], 16) for path in records(kept)}
    needed = [path for path in found if "-chunk-" in path.name]
    ends = [path for path, end in found.items() if "-tail-" in path.name and end >= len(prompt) - 1]
    if loaded.model.cache_layout.states:  # a state at the very place, not one further on
        ends = [path for path in ends if found[path] == len(prompt) - 1]
    assert len(needed) == len(prompt) // 512
    assert len(ends) == 1
    needed += ends
    wrong: list[str] = []
    for number in range(flips):
        place = _copy(kept, folder / str(number))
        path = place / choose.choice(needed)
        raw = bytearray(path.read_bytes())
        at = choose.randrange(8 * len(raw)) if number % 2 else choose.randrange(8 * 300)  # its header as often
        raw[at // 8] ^= 1 << at % 8
        path.write_bytes(raw)
        found, reused = _run(load, kind, place, prompt, boundaries)
        if found != tokens or reused >= len(prompt) - 1:
            wrong.append(
                f"bit {at} of {path.name}: {reused} reused, tokens {'as' if found == tokens else 'not as'} before"
            )
        shutil.rmtree(place)
    assert wrong == []


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def _run(
    load: Load, kind: str, cache_dir: Path, prompt: list[int], boundaries: list[Boundary]
) -> tuple[list[int], int]:
    loaded = load(kind, "float32")
    engine = PromptEngine(loaded.model, tiny_budgets(loaded, cache_dir))
    answer = engine.one(prompt, boundaries, 6)
    engine.close()
    return answer.tokens, answer.cached


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_are_seen(load: Load, kind: str, quick_path: Path) -> None:
    flip_bits(load, kind, quick_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_flipped_bits_are_seen(load: Load, kind: str, quick_path: Path) -> None:
    flip_bits(load, kind, quick_path, 200)
