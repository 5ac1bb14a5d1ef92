"""A server's counters, as /v1/stats gives them (docs/api.md), as what is kept of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from ftlaunch.machine.served import Prompt, Served, Setting

LEAST_STEPS = 64  # fewer tell too little
MOST_BATCH = 1.1  # sequences a step, in the mean: what is predicted is one
LEAST_PROMPT, MOST_PROMPT = 64, 2048  # tokens of the prompts that are compared: what one step computes


def served(stats: Mapping[str, Any], server: str) -> tuple[Served, str | None] | None:
    """What it did, and the GPU's name. None where the counters tell of too few steps, or of several sequences at a
    time. Raises LookupError, TypeError, AttributeError or ValueError for what are no such counters.
    """
    engine, facts = stats["engine"], stats["facts"]
    steps = engine["steps"]
    if steps["count"] < LEAST_STEPS or steps["mean_batch"] > MOST_BATCH or not steps["p50_ms"] > 0:
        return None
    setting, gpu = _setting(facts, engine.get("experts")), _value(facts, "gpu")
    found = Served(
        server,
        datetime.date.today().isoformat(),
        setting,
        round(1e3 / float(steps["p50_ms"]), 2),
        int(steps["count"]),
        _hit_rate(engine.get("experts")),
        _prompt(stats.get("first_tokens") or ()),
        _foretold(engine.get("experts")),
    )
    return found, None if gpu is None or setting.device == "cpu" else str(gpu).partition(" (")[0]


def _setting(facts: Mapping[str, Any], experts: Mapping[str, Any] | None) -> Setting:
    device = str(_value(facts, "device")).partition(" ")[0]
    dtype = "float32" if _value(facts, "dtype") == "float32" else None
    if device == "cpu":
        return Setting(device, threads=_value(facts, "threads"), dtype=dtype)
    slots = min(1.0, experts["slots"] / experts["pool"]) if experts and experts["pool"] else None
    strategy = _value(facts, "moe_backend")
    threads = _value(facts, "moe_cpu_threads") if strategy in ("cpu", "hybrid") else None
    return Setting(device, strategy, slots, threads, dtype)


def _hit_rate(experts: Mapping[str, Any] | None) -> float | None:
    if not experts or experts["resident"]:
        return None
    total = experts["total"]
    return float(total["hit_rate"]) if total["hits"] + total["misses"] else None


def _foretold(experts: Mapping[str, Any] | None) -> float | None:
    """None where nothing was copied ahead, as by a server that does not do that: it tells nothing of the model."""
    total = experts["total"] if experts and not experts["resident"] else {}
    if not total.get("prefetched"):
        return None
    used = int(total["foretold"])
    missing = used + total["misses"]
    return round(used / missing, 4) if missing else None


def _prompt(first_tokens: Iterable[Mapping[str, Any]]) -> Prompt | None:
    """The median of those that nothing was reused for."""
    cold = [
        (each["prompt"], each["seconds"])
        for each in first_tokens
        if not each["cached"] and LEAST_PROMPT <= each["prompt"] <= MOST_PROMPT and each["seconds"] > 0
    ]
    if not cold:
        return None
    return Prompt(round(median(tokens for tokens, _ in cold)), round(median(seconds for _, seconds in cold), 4))


def _value(facts: Mapping[str, Any], name: str) -> Any:
    return (facts.get(name) or {}).get("value")
