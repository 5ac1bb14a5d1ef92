"""What the probes have found of a machine, and what servers have done on it, as a model's predicted speed."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from ftengine.kernels import native
from ftengine.models.gpu.strategy import Lanes
from ftlaunch.machine import hits, lanes, memory_read, served
from ftlaunch.machine.fit import Fit, Model
from ftlaunch.machine.hits import Hits
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.served import Entry
from ftlaunch.machine.speed import CONTEXT, Machine, Span, Speed, Term, predict
from ftlaunch.machine.verdict import Finding

DEVICE_SHARE = 0.88  # of what a GPU's memory could move: what kernels read of it
LINK_SHARE = 0.85  # of what a link carries, packet headers off
CPU_SHARE = 0.7  # of what all threads read: experts on the CPU beside a GPU
AFTER = 1.2  # a range's ends, in parts of what follows from a served rate
FAR = 0.5  # that a prediction is too high by, from where on something is wrong
ALIKE = 0.05  # difference of the shares of experts in slots at which a counted hit rate holds


def machine_of(asked: Asked, measure: bool = True) -> Machine:
    """measure: memory's bandwidth where the doctor has not, in about half a second."""
    known = asked.known
    host = known.get("memory.read", {}).get("bytes_per_second") or (memory_read.short() if measure else None)
    peak = known.get("gpu.device", {}).get("memory_bytes_per_second")
    best = known.get("gpu.link", {}).get("best_bytes_per_second")
    link = known.get("gpu.gather", {}).get("bytes_per_second") or (best * LINK_SHARE if best else None)
    kernels = os.environ.get("FT_ISA") or (native.kernel_choice()[0] if native.AVAILABLE else "portable")
    return Machine(host, peak * DEVICE_SHARE if peak else None, link, native.granted_threads(), kernels)


def assumed_lanes(model: Model, machine: Machine) -> Lanes | None:
    """Where neither engine nor doctor has measured them: both lanes share what memory gives."""
    if not (machine.link and machine.host and model.sizes.block):
        return None
    cpu = CPU_SHARE * machine.host
    return lanes.of_rates(machine.link, cpu, min(machine.link + cpu, machine.host), model.sizes.block)


def entry_of(model: Model, fit: Fit, asked: Asked) -> Entry:
    """By which this model on this machine is known, without what is known of it."""
    gpu = asked.known.get("gpu.use", {}).get("name") if fit.device == "cuda" else None
    return Entry(str(model.path.absolute()), str(asked.known.get("cpu.processor", {}).get("name") or ""), gpu)


def speed(
    model: Model, fit: Fit, machine: Machine, lanes: Lanes | None, before: Entry | None
) -> tuple[Speed, Hits] | None:
    """As it would be predicted if only the hit rate of what was served were known, and those hits."""
    share = fit.slots / model.sizes.total if model.sizes.total else 1.0
    expected = hits.expected(share)
    found = None if before is None else before.served
    if found is not None and found.hit_rate is not None and abs((found.slots or 0.0) - share) <= ALIKE:
        expected = hits.counted(found.hit_rate)
    made = predict(model, fit, machine, expected, lanes or assumed_lanes(model, machine))
    return None if made is None else (made, expected)


def corrected(made: Speed, fit: Fit, entry: Entry | None) -> Speed:
    """By how far the first prediction was from what was then served in the same way."""
    if entry is None or entry.error is None or entry.served is None:
        return made
    strategy = fit.strategy.strategy if fit.strategy is not None else None
    if entry.served.device != fit.device or (fit.device == "cuda" and entry.served.strategy != strategy):
        return made
    likely = made.decode.likely / (1 + entry.error)
    beyond = 1e3 / likely - 1e3 / made.decode.likely
    term = Term("as it was served", "", Span(beyond, beyond, beyond))
    decode = Span(likely / AFTER, likely, likely * AFTER)
    return replace(made, decode=decode, decode_terms=(*made.decode_terms, term))


def finding(model: Model, fit: Fit, asked: Asked, known: Lanes | None) -> Finding:
    """`model.speed`. A first prediction of a model that was served already is kept beside that."""
    machine, mine = machine_of(asked), entry_of(model, fit, asked)
    entry = served.find(Path(mine.model), mine.cpu, mine.gpu)
    first = speed(model, fit, machine, known, entry)
    if first is None:
        why = "of the GPU's memory or of the link to it no bandwidth is told"
        if fit.device == "cpu":
            why = "memory was not measured" if not machine.host else f"no figures for the {machine.kernels} kernels"
        return Finding("model.speed", "speed", f"not predicted: {why}", "note", data={})
    made, expected = first
    if entry is not None and entry.served is not None and entry.predicted is None:
        entry = served.keep(msgspec.structs.replace(entry, predicted=served.predicted(made)))
    final = corrected(made, fit, entry)
    value, data = said(final), _data(final, expected, entry)
    if entry is None or entry.served is None or entry.error is None:
        return Finding("model.speed", "speed", value, data=data)
    rate = entry.served.tokens_per_second
    value += f"; served on {entry.served.day}: {rate:.3g} tokens/s, the first prediction was {entry.error:+.0%} off"
    told = Finding("model.speed", "speed", value, data=data)
    if entry.error <= FAR:
        return told
    cost = f"it was {1 / (1 + entry.error):.0%} as fast as this machine should make it"
    return told.but("note", cost, "end what else computes; ft doctor tells what slows this machine down")


def said(made: Speed) -> str:
    """In some words."""
    decode, prompt = made.decode, made.prompt
    rates = f"{decode.low:.3g} to {decode.high:.3g} tokens/s"
    return f"{rates}, {CONTEXT} tokens of a first prompt in {prompt.low:.2g} to {prompt.high:.2g} s"


def _data(made: Speed, expected: Hits, entry: Entry | None) -> dict[str, Any]:
    record = {} if entry is None else msgspec.to_builtins(entry)
    return {
        "tokens_per_second": asdict(made.decode),
        "prompt_seconds": asdict(made.prompt),
        "prompt_tokens": CONTEXT,
        "hits": asdict(expected),
        "decode_terms": [_term(term) for term in made.decode_terms],
        "prompt_terms": [_term(term) for term in made.prompt_terms],
        "predicted": record.get("predicted"),
        "served": record.get("served"),
        "error": None if entry is None else entry.error,
    }


def _term(term: Term) -> dict[str, Any]:
    ms = asdict(term.ms)
    return {"name": term.name, "formula": term.formula, "bytes": term.bytes, "bandwidth": term.bandwidth, "ms": ms}
