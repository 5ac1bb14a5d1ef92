"""Which models of the catalogue this machine runs, and how well: by bundled facts, so that no network is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftengine.config import EngineConfig
from ftengine.memory.plan import lane_threads
from ftlaunch.machine import bundled, hits, predict, served
from ftlaunch.machine.fit import fit
from ftlaunch.machine.model import known_lanes, room_of
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.served import Setting
from ftlaunch.machine.speed import Machine, Speed
from ftlaunch.machine.speed import predict as predicted
from ftlaunch.machine.verdict import Finding, gib, plural
from ftlaunch.store.catalogue import CATALOGUE

NOTICE = "estimate from bundled facts"


def probe(asked: Asked) -> Iterator[Finding]:
    """With --quick nothing is measured, so that only what fits is told."""
    machine = Machine() if asked.quick else predict.machine_of(asked, measure=False)
    for name in bundled.FACTS:
        yield entry(name, asked, machine)
    yield from compared(asked)
    later = [name for name, entry in CATALOGUE.items() if not entry.served]
    if later:
        yield Finding("catalogue.later", "not served yet", ", ".join(later), data={"models": later})


def entry(name: str, asked: Asked, machine: Machine) -> Finding:
    model, room = bundled.model(name), room_of(asked)
    known = known_lanes(model, room, asked, lane_threads(EngineConfig(name)).value)
    found = fit(model, room, known)
    data: dict[str, Any] = {"model": name, "fits": found.fits, "needed": found.memory, "device": found.device}
    data |= {"strategy": found.strategy.strategy if found.strategy else None, "tokens_per_second": None}
    if not found.fits:
        value = f"{name}: does not fit, it needs {gib(found.memory)} of memory, {gib(room.memory)} are available"
        return Finding("catalogue.model", "too large", value, "note", data=data)
    where = "on the CPU" if found.device == "cpu" else f"{data['strategy']}, on the GPU"
    share = found.slots / model.sizes.total
    lanes = known or predict.assumed_lanes(model, machine)
    foretold = predict.foretold_of(predict.setting_of(model, found), served.Entry("", ""))
    made = predicted(model, found, machine, hits.expected(share), lanes, foretold)
    data["tokens_per_second"] = None if made is None else asdict(made.decode)
    return Finding("catalogue.model", "runs", f"{name}: {where}{_rates(made)} ({NOTICE})", data=data)


def compared(asked: Asked) -> Iterator[Finding]:
    """What servers did on this machine, against the first predictions."""
    for known in served.entries():
        if known.cpu != asked.known.get("cpu.processor", {}).get("name"):
            continue
        for first in known.predicted:
            runs = known.runs(first.setting)
            error = served.error(first, runs)
            if error is None:
                continue
            name = f"{Path(known.model).name}{_way(first.setting)}"
            data = {"model": known.model, "tokens_per_second": served.rate(runs), "error": error}
            value = f"{name}: {predict.compared(known, first.setting)}"
            likely = first.tokens_per_second[1]
            yield predict.judged(
                Finding("catalogue.served", "served", value, data=data), likely, "were predicted first", runs, asked
            )


def _way(setting: Setting) -> str:
    if setting.device == "cpu":
        return f", {plural(setting.threads, 'thread')}" if setting.threads else ""
    slots = f", {setting.slots:.0%} of its experts in slots" if setting.slots else ""
    threads = f", {plural(setting.threads, 'thread')}" if setting.threads else ""
    return f" ({setting.strategy}{slots}{threads})"


def _rates(made: Speed | None) -> str:
    return "" if made is None else f", {made.decode.low:.3g} to {made.decode.high:.3g} tokens/s"
