"""The agents' recorded sessions through the whole server with Qwen3.6's template and tokenizer: what is computed again.

The model is a small one whose answers are forced to be the recorded ones, in tokens of its own; budgets hold as many
states as 0.5, 4 and 20 GB hold of Qwen3.6's. What had to be computed is counted in the model's own forward. What should
have been is told from lists of tokens alone (replay.Known): the first token that nothing before had.

    python -m pytest tests/prompts/test_recordings.py -m slow -rP    # every recording, with tables
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftengine.config import EngineConfig
from ftengine.core import CacheLayout
from tests.prompts import small_models
from tests.prompts.house import House, house
from tests.prompts.replay import Script, Step, replay
from tests.prompts.tables import table
from tests.support.exchanges import exchanges, scenarios

CLIENTS = ("claude", "codex", "opencode", "openclaw")
APPENDS = ("claude", "codex", "opencode")  # OpenClaw moves a message to the end of each request and drops reasoning
LEAST_LOOP, LEAST_RESTART = 0.99, 0.98
Speaking = Callable[[str], tuple[Path, Script]]


@dataclass(frozen=True)
class Replayed:
    steps: list[Step]
    restarted: Step  # the first request with tools again, after the server was


def config(folder: Path, layout: CacheLayout, cache_dir: Path) -> EngineConfig:
    budgets = small_models.scaled(layout, small_models.BUDGETS)
    return EngineConfig(
        str(folder),
        dtype="bfloat16",
        device="cpu",
        threads=1,
        context=98_304,
        kv_tokens=98_304,
        max_running_requests=4,
        cache_device=budgets.device,
        cache_host=budgets.host,
        cache_disk=budgets.disk,
        cache_dir=str(cache_dir),
    )


async def replayed(folder: Path, script: Script, scenario: str, cache_dir: Path) -> Replayed:
    settings = config(folder, script.layout, cache_dir)
    recorded = exchanges(scenario)
    async with house(settings) as before:
        steps = await replay(before, script, recorded)
        await check_stats(before, steps)
    first = next((exchange for exchange in recorded if not exchange.side), recorded[0])
    async with house(settings) as after:
        (restarted,) = await replay(after, script, [first])
    return Replayed(steps, restarted)


async def check_stats(house: House, steps: list[Step]) -> None:
    """The totals that the server tells are those that were counted."""
    stats = await house.stats()
    prompt, reused = sum(step.length for step in steps), sum(step.reused for step in steps)
    assert (stats["tokens"]["prompt"], stats["tokens"]["cached"]) == (prompt, reused)
    prompts = stats["engine"]["prompts"]
    assert (prompts["prompt"], sum(prompts["reused"].values())) == (prompt, reused)


def faults(found: Replayed, client: str) -> list[str]:
    """Each bar that does not hold, with the request that breaks it."""
    result: list[str] = []
    for before, step in zip([None, *found.steps], found.steps, strict=False):
        name = step.exchange.name
        if step.work.prompt > step.allowed:
            result.append(f"{name}: {step.work.prompt} tokens computed, {step.allowed:.0f} allowed")
        if step.kind == "loop" and step.reused < LEAST_LOOP * step.previous:
            result.append(f"{name}: {step.reused} of the last prompt's {step.previous} tokens reused")
        if step.kind == "loop" and client in APPENDS and before is not None and _good_calls(before):
            path = before.work.path  # nothing of it truly changed
            if step.work.request.prompt[: len(path)] != path:
                result.append(f"{name}: goes on from {step.changed} of {len(path)} tokens that were there")
        if step.reported >= 0 and (step.cached, step.reported) != (step.reused, step.length):
            result.append(f"{name}: usage says {step.cached} of {step.reported}, it was {step.reused} of {step.length}")
        if (step.told["prompt"], step.told["reused"]) != (step.length, step.reused):
            result.append(f"{name}: /v1/stats says {step.told}")
    restarted = found.restarted
    if restarted.reused < LEAST_RESTART * restarted.length or restarted.told["tier"] != "disk":
        result.append(f"after a restart {restarted.reused} of {restarted.length} tokens reused")
    return result


def _good_calls(step: Step) -> bool:
    return all(call.freeform or call.values is not None for call in step.exchange.turn.calls)


def check(speaking: Speaking, kind: str, names: list[str], tmp_path: Path) -> None:
    folder, script = speaking(kind)
    problems: list[str] = []
    for number, scenario in enumerate(names):
        found = asyncio.run(replayed(folder, script, scenario, tmp_path / str(number)))
        print(table(f"{kind}, {scenario}", [*found.steps, found.restarted]))
        problems += faults(found, scenario.split("/")[0])
    assert problems == []


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [
        ("qwen3_5_moe", "claude/thinking"),
        ("qwen3_5_moe", "codex/tools.profile"),
        ("qwen3_moe", "opencode/err529"),
        ("qwen3_5_moe", "openclaw/thinking"),
    ],
)
def test_recording_computes_only_what_changed(speaking: Speaking, kind: str, scenario: str, tmp_path: Path) -> None:
    check(speaking, kind, [scenario], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", list(small_models.KINDS))
def test_every_recording_computes_only_what_changed(speaking: Speaking, kind: str, client: str, tmp_path: Path) -> None:
    names = [name for name in scenarios() if name.startswith(f"{client}/") and exchanges(name)]
    assert names
    check(speaking, kind, names, tmp_path)
