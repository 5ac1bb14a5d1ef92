"""Which models of the catalogue this machine runs, and how well: by bundled facts, so that no network is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftlaunch.machine import bundled, hits, predict, served
from ftlaunch.machine.fit import fit
from ftlaunch.machine.model import known_lanes, room_of
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.speed import Machine, Speed
from ftlaunch.machine.speed import predict as predicted
from ftlaunch.machine.verdict import Finding, gib
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
    known = known_lanes(model, room, asked)
    found = fit(model, room, known)
    data: dict[str, Any] = {"model": name, "fits": found.fits, "needed": found.memory, "device": found.device}
    data |= {"strategy": found.strategy.strategy if found.strategy else None, "tokens_per_second": None}
    if not found.fits:
        value = f"{name}: does not fit, it needs {gib(found.memory)} of memory, {gib(room.memory)} are available"
        return Finding("catalogue.model", "too large", value, "note", data=data)
    where = "on the CPU" if found.device == "cpu" else f"{data['strategy']}, on the GPU"
    share = found.slots / model.sizes.total
    lanes = known or predict.assumed_lanes(model, machine)
    made = predicted(model, found, machine, hits.expected(share), lanes)
    data["tokens_per_second"] = None if made is None else asdict(made.decode)
    return Finding("catalogue.model", "runs", f"{name}: {where}{_rates(made)} ({NOTICE})", data=data)


def compared(asked: Asked) -> Iterator[Finding]:
    """What servers did on this machine, against the first predictions."""
    for known in served.entries():
        if known.error is None or known.served is None or known.cpu != asked.known.get("cpu.processor", {}).get("name"):
            continue
        rate = known.served.tokens_per_second
        value = f"{Path(known.model).name}: {rate:.3g} tokens/s on {known.served.day}"
        value += f", the first prediction was {known.error:+.0%} off"
        data = {"model": known.model, "tokens_per_second": rate, "error": known.error}
        yield Finding("catalogue.served", "served", value, data=data)


def _rates(made: Speed | None) -> str:
    return "" if made is None else f", {made.decode.low:.3g} to {made.decode.high:.3g} tokens/s"
