"""Long sessions through the whole server, within budgets as of 0.5, 4 and 20 GB: 60,000 tokens and 100 tool calls,
edited as agents edit; and two sessions that take turns.

    python -m pytest tests/prompts/test_sessions.py -m slow -rP
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prompts.growing import GrowingSession
from tests.prompts.house import house
from tests.prompts.replay import Known, Replay, Script, Step
from tests.prompts.tables import table
from tests.prompts.test_recordings import LEAST_LOOP, LEAST_RESTART, config
from tests.support.exchanges import exchanges

Speaking = Callable[[str], tuple[Path, Script]]


def check(steps: list[Step]) -> None:
    over = [
        f"{step.exchange.name}: {step.work.prompt} of {step.length} tokens computed, {step.allowed:.0f} allowed"
        for step in steps
        if step.work.prompt > step.allowed
    ]
    assert over == []


def check_loop(steps: list[Step]) -> None:
    """Of a session that only grows."""
    short = [
        f"{step.exchange.name}: {step.reused} of {step.previous}"
        for step in steps
        if step.kind == "loop" and step.reused < LEAST_LOOP * step.previous
    ]
    assert short == []


async def grow(replay: Replay, session: GrowingSession, calls: int) -> None:
    for _ in range(calls):
        await replay.send(session.request())


async def edit(replay: Replay, session: GrowingSession, calls: int) -> None:
    """Each edit is followed by a request; what an edit leaves is what the next one works on."""
    for number in sorted({calls * 3 // 4, calls // 2, calls // 4, 1}, reverse=True):
        session.clear_output(number)
        await replay.send(session.request())
    session.cut(calls // 3, calls // 2)
    await replay.send(session.request())
    session.rewind(calls // 5)
    session.ask("Do it in another way.")
    await replay.send(session.request())


async def long_session(folder: Path, script: Script, cache_dir: Path, calls: int, words: int) -> list[Step]:
    session, settings = GrowingSession(words), config(folder, script.layout, cache_dir)
    async with house(settings) as before:
        replay = Replay(before, script)
        await grow(replay, session, calls)
        steps = list(replay.steps)
        await edit(replay, session, calls)
        steps += replay.steps[len(steps) :]
    async with house(settings) as after:
        replay.house = after  # the client goes on as if nothing had been
        restarted = await replay.send(session.request())
    print(table("a growing session, edits, a restart", [*steps[:: max(1, calls // 10)], *steps[calls:], restarted]))
    check(steps)
    check_loop(steps[:calls])
    check([restarted])
    assert restarted.reused >= LEAST_RESTART * restarted.previous
    return steps


def test_growing_session_is_edited(speaking: Speaking, tmp_path: Path) -> None:
    asyncio.run(long_session(*speaking("qwen3_5_moe"), tmp_path, 8, 300))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_moe"])
def test_sixty_thousand_tokens_and_a_hundred_calls(speaking: Speaking, kind: str, tmp_path: Path) -> None:
    steps = asyncio.run(long_session(*speaking(kind), tmp_path, 100, 370))
    assert steps[99].length > 55_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_moe"])
def test_two_sessions_take_turns(speaking: Speaking, kind: str, tmp_path: Path) -> None:
    folder, script = speaking(kind)

    async def run() -> list[Step]:
        async with house(config(folder, script.layout, tmp_path)) as server:
            known = Known()
            sessions = [(Replay(server, script, known), exchanges(name)) for name in ("claude/tools", "codex/long")]
            for turn in itertools.zip_longest(*(them for _, them in sessions)):
                for (replay, _), exchange in zip(sessions, turn, strict=True):
                    if exchange is not None:
                        await replay.send(exchange)
            return [step for replay, _ in sessions for step in replay.steps]

    steps = asyncio.run(run())
    print(table(f"{kind}, two sessions by turns", steps))
    check(steps)
    check_loop(steps)
