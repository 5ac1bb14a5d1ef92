"""`speed.json`: what servers of this machine really did, beside what was predicted. docs/fit.md is its schema.

Written by commands that ask a server for its counters, and read by those that predict. Bad content is as good as none.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ftengine.memory.folders import cache_folder

if TYPE_CHECKING:
    from ftlaunch.machine.speed import Speed

FILE_NAME, VERSION, KEPT = "speed.json", 1, 32
MOST_BYTES = 1 << 20
LEAST_STEPS = 64  # fewer tell too little
MOST_BATCH = 1.1  # sequences a step, in the mean: what is predicted is one


class Predicted(msgspec.Struct, frozen=True):
    """Before the model was served. tokens_per_second: low, likely, high."""

    day: str
    tokens_per_second: tuple[float, float, float]
    prompt_seconds: tuple[float, float, float]

    def __post_init__(self) -> None:
        _check(*self.tokens_per_second, *self.prompt_seconds)


class Served(msgspec.Struct, frozen=True):
    """tokens_per_second: by the median step. slots: of all experts, a share. hit_rate: None where none is counted."""

    day: str
    tokens_per_second: float
    steps: int
    device: str
    strategy: str | None = None
    slots: float | None = None
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        _check(self.tokens_per_second)
        for share in (self.slots, self.hit_rate):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{share} is not a share")


class Entry(msgspec.Struct, frozen=True):
    """model: the absolute path of a directory or file. cpu, gpu: names; another machine's entry is not used."""

    model: str
    cpu: str
    gpu: str | None = None
    predicted: Predicted | None = None
    served: Served | None = None

    @property
    def error(self) -> float | None:
        """Of the likely rate, in parts of the served one; None without both."""
        if self.predicted is None or self.served is None:
            return None
        return self.predicted.tokens_per_second[1] / self.served.tokens_per_second - 1


def find(model: Path, cpu: str, gpu: str | None) -> Entry | None:
    return next((entry for entry in entries() if _same(entry, Entry(str(model), cpu, gpu))), None)


def keep(entry: Entry) -> Entry:
    """Adds it, or what it has to what is known of the same model and machine. A folder that cannot be written to is
    no failure of the command that would keep something there. Gives all that is known.
    """
    from ftlaunch.paths import write_private

    known = entries()
    before = next((other for other in known if _same(other, entry)), entry)
    entry = msgspec.structs.replace(
        entry, predicted=entry.predicted or before.predicted, served=entry.served or before.served
    )
    others = [other for other in known if not _same(other, entry)]
    content = {"version": VERSION, "models": msgspec.to_builtins([entry, *others][:KEPT])}
    try:
        write_private(cache_folder() / FILE_NAME, json.dumps(content, indent=1) + "\n")
    except OSError:
        pass
    return entry


def predicted(speed: Speed) -> Predicted:
    decode, prompt = speed.decode, speed.prompt
    return Predicted(
        _today(),
        (round(decode.low, 2), round(decode.likely, 2), round(decode.high, 2)),
        (round(prompt.low, 4), round(prompt.likely, 4), round(prompt.high, 4)),
    )


def entry_of(known: Mapping[str, Mapping[str, Any]]) -> Entry | None:
    """Of a model that was predicted; known: data of findings by their ids. Its path is not told yet."""
    speed, device = known.get("model.speed"), known.get("model.strategy", {}).get("device")
    if not speed or speed.get("predicted"):
        return None
    gpu = known.get("gpu.use", {}).get("name") if device == "cuda" else None
    rates, times = (_ends(speed[name]) for name in ("tokens_per_second", "prompt_seconds"))
    return Entry("", str(known.get("cpu.processor", {}).get("name") or ""), gpu, Predicted(_today(), rates, times))


def _ends(span: Mapping[str, float]) -> tuple[float, float, float]:
    return span["low"], span["likely"], span["high"]


def served(stats: dict[str, Any]) -> tuple[Served, str | None] | None:
    """From /v1/stats (docs/api.md), and the GPU's name. None where they tell of too few steps, or of several sequences
    at a time. Raises LookupError, TypeError or ValueError for what are no such counters.
    """
    engine, facts = stats["engine"], stats["facts"]
    steps = engine["steps"]
    if steps["count"] < LEAST_STEPS or steps["mean_batch"] > MOST_BATCH or not steps["p50_ms"] > 0:
        return None
    experts, gpu = engine.get("experts"), _value(facts, "gpu")
    hits, slots = None, None
    if experts and experts["pool"]:
        slots = min(1.0, experts["slots"] / experts["pool"])
        total = experts["total"]
        if not experts["resident"] and total["hits"] + total["misses"]:
            hits = float(total["hit_rate"])
    device = str(_value(facts, "device")).partition(" ")[0]
    rate, strategy = 1e3 / float(steps["p50_ms"]), _value(facts, "moe_backend")
    found = Served(_today(), round(rate, 2), int(steps["count"]), device, strategy, slots, hits)
    return found, None if gpu is None or device == "cpu" else str(gpu).partition(" (")[0]


def _value(facts: dict[str, Any], name: str) -> Any:
    return (facts.get(name) or {}).get("value")


def _same(one: Entry, other: Entry) -> bool:
    return (one.model, one.cpu, one.gpu) == (other.model, other.cpu, other.gpu)


def entries() -> list[Entry]:
    """The newest first; of any machine."""
    try:
        with (cache_folder() / FILE_NAME).open("rb") as file:
            content = json.loads(file.read(MOST_BYTES))
        if content["version"] != VERSION:
            return []
        listed = list(content["models"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    found = []
    for each in listed:
        try:
            found.append(msgspec.convert(each, Entry))
        except msgspec.ValidationError:
            continue
    return found


def _check(*values: float) -> None:
    """Raises ValueError."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError("not a rate or a time")


def _today() -> str:
    return datetime.date.today().isoformat()
