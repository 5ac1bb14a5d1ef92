"""Decoding: tokens a second of answers that are computed at the same time, and the gaps between their pieces."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ftengine.errors import FtError
from ftlaunch.bench.client import Reply, Target, get, streams
from ftlaunch.bench.place import Show, expert_counts
from ftlaunch.bench.prompts import Prompts
from ftlaunch.bench.report import Point
from ftlaunch.bench.room import check_room

PATH = "/v1/completions"


@dataclass(frozen=True)
class Decode:
    prompt: int = 512  # tokens
    output: int = 128  # tokens
    streams: tuple[int, ...] = (1,)
    runs: int = 3
    warmup: int = 1  # runs that are not counted
    temperature: float = 1.0
    prompts: str = "code"


def measure(target: Target, settings: Decode, show: Show) -> list[Point]:
    """A point for each number of streams. Raises FtError."""
    most = get(target, "/health").get("max_running_requests")
    if isinstance(most, int) and max(settings.streams) > most:
        at_once = f"the server computes at most {most} answer{'s' * (most > 1)} at once"
        raise FtError(at_once, f"--streams {most}, or a server with --max-running-requests {max(settings.streams)}")
    _check_room(target, settings)
    prompts = Prompts.of(target, settings.prompts)
    return [_point(target, settings, prompts, count, show) for count in settings.streams]


def _check_room(target: Target, settings: Decode) -> None:
    def mend(excess: int) -> str:
        if excess < settings.prompt:
            return f"--prompt {settings.prompt - excess}"
        return "--prompt and --output with smaller numbers"

    check_room(target, "a prompt and its answer", settings.prompt + settings.output, settings.prompts, mend)


def _point(target: Target, settings: Decode, prompts: Prompts, count: int, show: Show) -> Point:
    samples: dict[str, list[float]] = {}
    stage = f"decode, {count} stream{'s' * (count > 1)}"
    runs = settings.warmup + settings.runs
    for run in range(runs):
        show(stage, run / runs)
        found = _run(target, settings, prompts, count, run)
        if run >= settings.warmup:
            for name, value in found.items():
                samples.setdefault(name, []).append(value)
    show(stage, 1.0)
    return Point({"streams": count, "prompt": settings.prompt, "output": settings.output}, [samples])


def _run(target: Target, settings: Decode, prompts: Prompts, count: int, run: int) -> dict[str, float]:
    bodies = [
        {
            "prompt": prompts.unique(settings.prompt, f"decode {run} {number}"),
            "max_tokens": settings.output,
            "temperature": settings.temperature,
            "seed": run * 1000 + number,
            "ignore_eos": True,
        }
        for number in range(count)
    ]
    # With the prompts in the cache, no stream's decoding waits for another one's prompt.
    streams(target, PATH, [{**body, "max_tokens": 1} for body in bodies])
    before = expert_counts(get(target, "/v1/stats"))
    replies = streams(target, PATH, bodies)
    after = expert_counts(get(target, "/v1/stats"))
    return {**_rates(replies, settings.output), **_hits(before, after)}


def _rates(replies: list[Reply], wanted: int) -> dict[str, float]:
    rates = [rate for reply in replies if (rate := reply.tokens_per_second) is not None]
    if len(rates) < len(replies):
        raise FtError(
            f"the server ended an answer after {min(reply.output_tokens for reply in replies)} of {wanted} tokens",
            "--output with a smaller number, or a server with a longer --context",
        )
    if max(reply.first for reply in replies) > min(reply.last for reply in replies):
        reason = f"{len(replies)} streams did not run at the same time, so their rates cannot be added"
        raise FtError(reason, "fewer --streams, or a longer --output")
    gaps = [1e3 * (after - before) for reply in replies for before, after in pairwise(reply.arrivals)]
    found = {"tokens_per_second": sum(rates), "first_token_ms": 1e3 * max(reply.first for reply in replies)}
    found["output_tokens"] = statistics.fmean(reply.output_tokens for reply in replies)
    if gaps:
        found |= {"gap_median_ms": statistics.median(gaps), "gap_p99_ms": p99(gaps), "gap_max_ms": max(gaps)}
    return found


def p99(values: list[float]) -> float:
    """The smallest value that 99 % are not above."""
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def _hits(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """The share of experts that were in slots, where the server has slots and looks them up."""
    if not before or not after:
        return {}
    # "foretold" are hits that were copied for this very step; a server of an older version has none.
    hits, misses, foretold = (
        after["total"].get(name, 0) - before["total"].get(name, 0) for name in ("hits", "misses", "foretold")
    )
    return {"hit_rate": (hits - foretold) / (hits + misses)} if hits + misses > 0 else {}
