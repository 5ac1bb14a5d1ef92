"""Prompts: the time to the first token, of prompts that no cache knows and of known ones with new tokens behind."""

from __future__ import annotations

from dataclasses import dataclass

from ftlaunch.bench.client import Reply, Target, stream
from ftlaunch.bench.place import Show
from ftlaunch.bench.prompts import Prompt, Prompts
from ftlaunch.bench.report import Point
from ftlaunch.bench.room import check_room

PATH = "/v1/completions"


@dataclass(frozen=True)
class Prefill:
    cold: tuple[int, ...] = (128, 512, 2048)  # tokens
    prefix: int = 2048  # tokens that are in the cache
    new: tuple[int, ...] = (16, 64, 256)  # tokens behind them
    runs: int = 3
    warmup: int = 1
    prompts: str = "code"


def measure(target: Target, settings: Prefill, show: Show) -> list[Point]:
    """A point for each length of a cold prompt, and each number of new tokens. Raises FtError."""
    _check_room(target, settings)
    prompts = Prompts.of(target, settings.prompts)
    points = [_cold(target, settings, prompts, tokens, show) for tokens in settings.cold]
    if settings.new:
        points += [_warm(target, settings, prompts, tokens, show) for tokens in settings.new]
    return points


def _check_room(target: Target, settings: Prefill) -> None:
    most = max((*settings.cold, settings.prefix + max(settings.new, default=0) if settings.new else 0))

    def mend(excess: int) -> str:
        return f"--cold and --prefix below {most - excess} tokens"

    check_room(target, "a prompt and its answer", most + 1, settings.prompts, mend)


def _cold(target: Target, settings: Prefill, prompts: Prompts, tokens: int, show: Show) -> Point:
    samples: dict[str, list[float]] = {}
    runs = settings.warmup + settings.runs
    for run in range(runs):
        show(f"cold prompts of {tokens} tokens", run / runs)
        reply = _first(target, prompts.unique(tokens, f"cold {tokens} {run}"))
        if run >= settings.warmup:
            _add(samples, reply)
    show(f"cold prompts of {tokens} tokens", 1.0)
    return Point({"kind": "cold", "tokens": tokens}, [samples])


def _warm(target: Target, settings: Prefill, prompts: Prompts, tokens: int, show: Show) -> Point:
    """Each run has a prefix of its own, which is sent alone before."""
    samples: dict[str, list[float]] = {}
    runs = settings.warmup + settings.runs
    for run in range(runs):
        show(f"{tokens} new tokens", run / runs)
        prefix = prompts.unique(settings.prefix, f"prefix {run}")
        _first(target, prefix)
        reply = _first(target, prompts.extended(prefix, tokens, f"new {tokens} {run}"))
        if run >= settings.warmup:
            _add(samples, reply)
    show(f"{tokens} new tokens", 1.0)
    return Point({"kind": "warm", "tokens": tokens, "prefix": settings.prefix}, [samples])


def _first(target: Target, prompt: Prompt) -> Reply:
    return stream(target, PATH, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})


def _add(samples: dict[str, list[float]], reply: Reply) -> None:
    for name, value in prompt_samples(reply).items():
        samples.setdefault(name, []).append(value)


def prompt_samples(reply: Reply) -> dict[str, float]:
    """What a reply tells of its prompt. Without the server's count of cached tokens, none is taken as new."""
    found = {"first_token_ms": 1e3 * reply.first, "prompt_tokens": float(reply.prompt_tokens)}
    if reply.cached_tokens is not None:
        new = reply.prompt_tokens - reply.cached_tokens
        found |= {"cached_tokens": float(reply.cached_tokens), "new_tokens": float(new)}
        found["prompt_tokens_per_second"] = new / reply.first
    else:
        found["prompt_tokens_per_second"] = reply.prompt_tokens / reply.first
    return found
