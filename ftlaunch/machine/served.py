"""`speed.json`: what servers of this machine really did, beside what was predicted. docs/fit.md is its schema.

Written as servers end, and by commands that ask one for its counters; read by those that predict. Bad content is as
good as none.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ftengine.locks import locked
from ftengine.memory.folders import cache_folder

if TYPE_CHECKING:
    from ftlaunch.machine.speed import Speed

FILE_NAME, LOCK_NAME, VERSION = "speed.json", ".speed.json.lock", 2
KEPT, RUNS = 32, 24  # models; of each, servers that are kept, and first predictions
MOST_BYTES = 1 << 20
ALIKE = 0.12  # that shares of experts in slots may differ by, of the larger one: the hit rate is then about the same
T = TypeVar("T", bound="Predicted | Served")


class Setting(msgspec.Struct, frozen=True):
    """What changes the speed of a model on a machine. slots: of all experts, a share; None where there are none.

    threads: those that compute experts, or on the CPU everything; None where the CPU computes nothing. dtype: of
    activations, where it is not bfloat16.
    """

    device: str
    strategy: str | None = None
    slots: float | None = None
    threads: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.slots is not None and not 0 <= self.slots <= 1:
            raise ValueError(f"{self.slots} is not a share")

    def alike(self, other: Setting) -> bool:
        same = all(getattr(self, name) == getattr(other, name) for name in ("device", "strategy", "threads", "dtype"))
        mine, theirs = self.slots or 0.0, other.slots or 0.0
        return same and abs(mine - theirs) <= ALIKE * max(mine, theirs)


class Predicted(msgspec.Struct, frozen=True):
    """Before the model was served so. tokens_per_second, prompt_seconds: low, likely, high.

    prompts: the likely seconds until the first token, by tokens of a cold prompt; ascending.
    """

    day: str
    setting: Setting
    tokens_per_second: tuple[float, float, float]
    prompt_seconds: tuple[float, float, float]
    prompts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check(*self.tokens_per_second, *self.prompt_seconds, *(seconds for _, seconds in self.prompts))
        if any(few >= many for (few, _), (many, _) in pairwise(self.prompts)):
            raise ValueError("the lengths of prompts do not ascend")

    def prompt(self, tokens: int) -> float | None:
        """Likely seconds of a cold prompt of so many tokens; None where that was not predicted."""
        return between(self.prompts, tokens)


class Prompt(msgspec.Struct, frozen=True):
    """A cold one: its tokens, and seconds until the first token of the answer."""

    tokens: int
    seconds: float

    def __post_init__(self) -> None:
        _check(self.tokens, self.seconds)


class Served(msgspec.Struct, frozen=True):
    """One server's life until it ended, or was last asked. tokens_per_second: by the median step.

    hit_rate: None where none is counted. prompt: the median of its cold prompts, None without any. foretold: of the
    experts that were not found in slots, those that were copied into one before their layer began; None where nothing
    was copied so.
    """

    server: str
    day: str
    setting: Setting
    tokens_per_second: float
    steps: int
    hit_rate: float | None = None
    prompt: Prompt | None = None
    foretold: float | None = None

    def __post_init__(self) -> None:
        _check(self.tokens_per_second)
        for share in (self.hit_rate, self.foretold):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{share} is not a share")


class Entry(msgspec.Struct, frozen=True):
    """model: the absolute path of a directory or file. cpu, gpu: names; another machine's entry is not used.

    predicted: the first prediction of each setting; served: servers. Both the newest first.
    """

    model: str
    cpu: str
    gpu: str | None = None
    predicted: tuple[Predicted, ...] = ()
    served: tuple[Served, ...] = ()

    def first(self, setting: Setting) -> Predicted | None:
        return next((each for each in self.predicted if each.setting.alike(setting)), None)

    def runs(self, setting: Setting) -> list[Served]:
        return [each for each in self.served if each.setting.alike(setting)]


def rate(runs: Sequence[Served]) -> float:
    """Tokens a second of an undisturbed server: the upper quartile, for other programs only ever slow one down."""
    ranked = sorted((run.tokens_per_second for run in runs), reverse=True)
    return ranked[(len(ranked) - 1) // 4]


def hit_rate(runs: Sequence[Served]) -> float | None:
    """By steps: other programs do not change it."""
    return _by_steps((run.hit_rate, run.steps) for run in runs)


def foretold(runs: Iterable[Served]) -> float | None:
    """Of the experts that were missing, by steps."""
    return _by_steps((run.foretold, (1.0 - (run.hit_rate or 0.0)) * run.steps) for run in runs)


def _by_steps(shares: Iterable[tuple[float | None, float]]) -> float | None:
    counted = [(share, weight) for share, weight in shares if share is not None]
    whole = sum(weight for _, weight in counted)
    return sum(share * weight for share, weight in counted) / whole if whole else None


def error(first: Predicted | None, runs: Sequence[Served]) -> float | None:
    """Of the first likely rate, in parts of the served one: +0.25 where a quarter more was promised."""
    return first.tokens_per_second[1] / rate(runs) - 1 if first is not None and runs else None


def prompt_error(seconds: Callable[[int], float | None], runs: Sequence[Served]) -> float | None:
    """The same of a cold prompt's rate: +0.25 where it took a quarter longer than `seconds` of its tokens tell."""
    told = ((run.prompt, seconds(run.prompt.tokens)) for run in runs if run.prompt is not None)
    slower = sorted(prompt.seconds / likely for prompt, likely in told if likely)
    return slower[(len(slower) - 1) // 4] - 1 if slower else None


def between(prompts: Iterable[tuple[int, float]], tokens: int) -> float | None:
    """Seconds of a prompt of so many tokens, from those of some lengths; None where it is shorter or longer."""
    for (few, short), (many, long) in pairwise(prompts):
        if few <= tokens <= many:
            return short + (long - short) * (tokens - few) / (many - few)
    return None


def find(model: str, cpu: str, gpu: str | None) -> Entry:
    """What is known of it; nothing, where that is so."""
    wanted = Entry(model, cpu, gpu)
    return next((entry for entry in entries() if _same(entry, wanted)), wanted)


def keep(entry: Entry) -> Entry:
    """Adds what it has to what is known of the same model and machine: of each setting the first prediction stays, of
    each server what it did last. A folder that cannot be written to is no failure of the command that would keep
    something there. Gives all that is known.
    """
    from ftlaunch.paths import write_private

    path = cache_folder() / FILE_NAME
    try:
        with locked(path.with_name(LOCK_NAME)):  # `ft stop --all` ends several servers at once
            merged, others = _merged(entry)
            content = {"version": VERSION, "models": msgspec.to_builtins([merged, *others][:KEPT])}
            write_private(path, json.dumps(content, indent=1) + "\n")
    except OSError:
        merged, _ = _merged(entry)
    return merged


def _merged(entry: Entry) -> tuple[Entry, list[Entry]]:
    """With what is known of the same model and machine; and all that is known of others."""
    known = entries()
    before = next((other for other in known if _same(other, entry)), Entry(entry.model, entry.cpu, entry.gpu))
    fresh = tuple(each for each in entry.predicted if before.first(each.setting) is None)
    servers = {each.server for each in entry.served}
    older = tuple(each for each in before.served if each.server not in servers)
    merged = msgspec.structs.replace(
        entry, predicted=_newest(fresh, before.predicted), served=_newest(entry.served, older)
    )
    return merged, [other for other in known if not _same(other, entry)]


def predicted(speed: Speed, setting: Setting) -> Predicted:
    decode, prompt = speed.decode, speed.prompt
    return Predicted(
        _today(),
        setting,
        (round(decode.low, 2), round(decode.likely, 2), round(decode.high, 2)),
        (round(prompt.low, 4), round(prompt.likely, 4), round(prompt.high, 4)),
        tuple((tokens, round(seconds, 4)) for tokens, seconds in speed.prompts),
    )


def prediction(known: Mapping[str, Mapping[str, Any]]) -> Entry | None:
    """Of a model that was just predicted; known: data of findings by their ids. Its path is not told yet."""
    found = known.get("model.speed", {}).get("prediction")
    if not found:
        return None
    made = msgspec.convert(found, Predicted)
    gpu = known.get("gpu.use", {}).get("name") if made.setting.device == "cuda" else None
    return Entry("", str(known.get("cpu.processor", {}).get("name") or ""), gpu, (made,))


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


def _newest(new: tuple[T, ...], old: tuple[T, ...]) -> tuple[T, ...]:
    return (*new, *old)[:RUNS]


def _same(one: Entry, other: Entry) -> bool:
    return (one.model, one.cpu, one.gpu) == (other.model, other.cpu, other.gpu)


def _check(*values: float) -> None:
    """Raises ValueError."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError("not a rate or a time")


def _today() -> str:
    return datetime.date.today().isoformat()
