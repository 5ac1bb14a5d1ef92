"""What the probes have found of a machine, and what servers have done on it, as a model's predicted speed."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import msgspec

from ftengine.kernels import native
from ftengine.memory.plan import default_lane_threads
from ftengine.models.gpu.strategy import Lanes
from ftlaunch.machine import hits, kernel_rate, lanes, memory_read, served
from ftlaunch.machine.computing import Computing, Watch
from ftlaunch.machine.fit import Fit, Model
from ftlaunch.machine.hits import Hits
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.served import Entry, Predicted, Served, Setting
from ftlaunch.machine.speed import Machine, Span, Speed, Term, computed_with, predict
from ftlaunch.machine.verdict import Finding, plural
from ftlaunch.machine.verdict import rate as bandwidth

DEVICE_SHARE = 0.88  # of what a GPU's memory could move: what kernels read of it
LINK_SHARE = 0.85  # of what a link carries, packet headers off
CPU_SHARE = 0.80  # of what its threads read: experts on the CPU beside a GPU; 0.65 to 0.92 were measured
AFTER = 1.2  # a range's ends, in parts of a served rate
AFTER_PROMPT = 1.4  # the same of a prompt's time
FAR = 0.6  # that a prediction is too high by, from where on something disturbs the server, or is wrong here
BELIEVED = 3  # servers that were so slow, from which on that is how this machine serves


def machine_of(asked: Asked, measure: bool = True, threads: int | None = None, dtype: str = "bfloat16") -> Machine:
    """measure: memory's bandwidth where the doctor has not, in about half a second, and what AVX2 kernels compute.
    threads: that compute, None for all. dtype: of activations on the CPU; in float32 all kernels of such a width
    multiply alike.
    """
    known, granted = asked.known, native.granted_threads()
    host = known.get("memory.read", {}).get("bytes_per_second") or (memory_read.short() if measure else None)
    few = threads is not None and threads < default_lane_threads().value
    lane = memory_read.short(threads) if few and measure else host
    peak = known.get("gpu.device", {}).get("memory_bytes_per_second")
    best = known.get("gpu.link", {}).get("best_bytes_per_second")
    link = known.get("gpu.gather", {}).get("bytes_per_second") or (best * LINK_SHARE if best else None)
    kernels = os.environ.get("FT_ISA") or (native.kernel_choice()[0] if native.AVAILABLE else "portable")
    if dtype == "float32" and kernels in ("avx512_bf16", "amx"):
        kernels = "avx512"
    used = min(threads or granted, granted)
    computes = kernel_rate.measured(used, kernels) if measure and kernels == "avx2" else None
    return Machine(host, lane, peak * DEVICE_SHARE if peak else None, link, used, kernels, computes)


def undisturbed(asked: Asked, fit: Fit) -> tuple[Machine, str]:
    """`machine_of`, and who computed while memory was read, empty where nobody did. Memory is then read once more, and
    the better reading kept: others only ever take some away.
    """
    from ftlaunch.servers import running

    watch = Watch(os.getppid(), running())  # who asked, and all of its probes
    machine = machine_of(asked, True, fit.threads, fit.dtype)
    if asked.known.get("memory.read", {}).get("bytes_per_second") or not watch.seen().who():
        return machine, ""  # what the doctor has measured, it has judged, too
    watch = Watch(os.getppid(), running())
    again = machine_of(asked, True, fit.threads, fit.dtype)
    host, lane = (max(filter(None, rates), default=None) for rates in zip(_read(machine), _read(again), strict=True))
    computes = max(filter(None, (machine.computes, again.computes)), key=lambda rate: rate.products, default=None)
    return replace(machine, host=host, lane=lane, computes=computes), watch.seen().who()


def _read(machine: Machine) -> tuple[float | None, float | None]:
    return machine.host, machine.lane


def assumed_lanes(model: Model, machine: Machine) -> Lanes | None:
    """Where neither engine nor doctor has measured them: both lanes share what memory gives."""
    if not (machine.link and machine.host and machine.lane and model.sizes.block):
        return None
    cpu = computed_with(model, machine, CPU_SHARE * machine.lane)
    return lanes.assumed(machine.link, cpu, min(machine.link + cpu, machine.host), model.sizes.block)


def entry_of(model: Model, fit: Fit, asked: Asked) -> Entry:
    """By which this model on this machine is known, without what is known of it."""
    gpu = asked.known.get("gpu.use", {}).get("name") if fit.device == "cuda" else None
    return Entry(str(model.path.absolute()), str(asked.known.get("cpu.processor", {}).get("name") or ""), gpu)


def setting_of(model: Model, fit: Fit) -> Setting:
    dtype = "float32" if fit.dtype == "float32" else None
    if fit.device == "cpu":
        return Setting("cpu", threads=fit.threads, dtype=dtype)
    strategy = fit.strategy.strategy if fit.strategy is not None else "resident"
    slots = fit.slots / model.sizes.total if model.sizes.total else None
    return Setting("cuda", strategy, slots, fit.threads if strategy in ("cpu", "hybrid") else None, dtype)


def hits_of(setting: Setting, entry: Entry) -> Hits:
    """As counted by servers with about as many experts in slots, or carried over from others; else of the curve."""
    share = 1.0 if setting.slots is None else setting.slots
    alike = served.hit_rate(entry.runs(setting))
    if alike is not None:
        return hits.counted(alike)
    near = min(
        (run for run in entry.served if run.hit_rate is not None and run.setting.slots),
        key=lambda run: abs((run.setting.slots or 0.0) - share),
        default=None,
    )
    if near is None or near.hit_rate is None or near.setting.slots is None:
        return hits.expected(share)
    return hits.carried(share, near.hit_rate, near.setting.slots)


def foretold_of(setting: Setting, entry: Entry) -> Hits:
    """As counted by servers with about as many experts in slots, or by others; else as stated."""
    if setting.strategy not in ("hybrid", "offload") or not setting.slots:
        return hits.NO_FORESIGHT
    alike = served.foretold(entry.runs(setting))
    if alike is not None:
        return hits.foretold(alike)
    return hits.foretold(served.foretold(entry.served), alike=False)


def corrected(made: Speed, runs: list[Served], first: Predicted | None = None) -> Speed:
    """By what was served. What is slower by more than FAR is not followed before BELIEVED servers were, unless that
    agrees with `first`, the prediction of before: then it is today's reading of memory that is unlike the others.
    """
    told = decode_error(made, runs)
    if told is not None and _followed(told, runs, served.error(first, runs)):
        likely = made.decode.likely / (1 + told)
        span = Span(likely / AFTER, likely, likely * AFTER)
        term = _beyond(1e3 / likely - 1e3 / made.decode.likely)
        made = replace(made, decode=span, decode_terms=(*made.decode_terms, term))
    told = prompt_error(made, runs)
    before = None if first is None else served.prompt_error(first.prompt, runs)
    if told is not None and _followed(told, [run for run in runs if run.prompt is not None], before):
        likely = made.prompt.likely * (1 + told)
        span = Span(likely / AFTER_PROMPT, likely, likely * AFTER_PROMPT)
        term = _beyond(1e3 * (likely - made.prompt.likely))
        made = replace(made, prompt=span, prompt_terms=(*made.prompt_terms, term))
    return made


def decode_error(made: Speed, runs: list[Served]) -> float | None:
    return made.decode.likely / served.rate(runs) - 1 if runs else None


def prompt_error(made: Speed, runs: list[Served]) -> float | None:
    return served.prompt_error(lambda tokens: served.between(made.prompts, tokens), runs)


def _followed(error: float, runs: list[Served], before: float | None) -> bool:
    """before: the first prediction's error."""
    return error <= FAR or len(runs) >= BELIEVED or (before is not None and before <= FAR)


def _beyond(ms: float) -> Term:
    return Term("as it was served", "", Span(ms, ms, ms))


def finding(model: Model, fit: Fit, asked: Asked, known: Lanes | None) -> Finding:
    """`model.speed`. What is told before a setting was ever served is kept, to be compared with what will be: later it
    would be made with what memory reads then. A pull keeps its own, once it is known where the model lies.
    """
    if fit.device == "cuda" and fit.dtype == "float32":
        why = "with --dtype float32 nothing was measured on a GPU"
        return Finding("model.speed", "speed", f"not predicted: {why}", "note", data={})
    (machine, who), mine = undisturbed(asked, fit), entry_of(model, fit, asked)
    who = who if _follows_memory(fit, known) else ""
    entry, setting = served.find(mine.model, mine.cpu, mine.gpu), setting_of(model, fit)
    expected, foreseen = hits_of(setting, entry), foretold_of(setting, entry)
    made = predict(model, fit, machine, expected, known or assumed_lanes(model, machine), foreseen)
    if made is None:
        why = "of the GPU's memory or of the link to it no bandwidth is told"
        if fit.device == "cpu":
            why = "memory was not measured" if not machine.host else f"no figures for the {machine.kernels} kernels"
        return Finding("model.speed", "speed", f"not predicted: {why}", "note", data={})
    runs, prediction = entry.runs(setting), served.predicted(made, setting)
    if not runs and entry.first(setting) is None and not (asked.to_fetch or asked.bundled):
        entry = served.keep(msgspec.structs.replace(mine, predicted=(prediction,)))
    final = corrected(made, runs, entry.first(setting))
    data = _data(final, expected, foreseen) | {"prediction": msgspec.to_builtins(prediction)} | told_of(entry, setting)
    if not runs:
        return _disturbed(Finding("model.speed", "speed", said(final), data=data), who)
    found = Finding("model.speed", "speed", f"{said(final)}; {compared(entry, setting)}", data=data)
    followed = final.decode is not made.decode
    return _disturbed(judged(found, made.decode.likely, _source(fit, machine), runs, asked, followed), who)


def _follows_memory(fit: Fit, known: Lanes | None) -> bool:
    """Whether host memory's bandwidth is a part of what is predicted."""
    return fit.device == "cpu" or (known is None and fit.strategy is not None and fit.strategy.strategy != "resident")


def _disturbed(found: Finding, who: str) -> Finding:
    """A note where somebody computed while memory was read, and nothing else is to be said."""
    if not who or found.cost:
        return found
    return found.but("note", f"computed while memory was read: {who}; it may be more", "end them, and look again")


def _source(fit: Fit, machine: Machine) -> str:
    """Where a likely rate comes from."""
    if fit.device == "cuda" or machine.lane is None:
        return "follow from what was measured of this machine"
    read = f"follow from memory read at {bandwidth(machine.lane)} just now"
    return f"{read}, and that differs from one minute to the next"


def told_of(entry: Entry, setting: Setting) -> dict[str, Any]:
    """For data of findings: the first prediction, the latest server, the undisturbed rate, and the errors."""
    first, runs = entry.first(setting), entry.runs(setting)
    return {
        "predicted": None if first is None else msgspec.to_builtins(first),
        "served": msgspec.to_builtins(runs[0]) | {"servers": len(runs), "rate": served.rate(runs)} if runs else None,
        "error": served.error(first, runs),
        "prompt_error": None if first is None else served.prompt_error(first.prompt, runs),
    }


def compared(entry: Entry, setting: Setting) -> str:
    """What its servers did against the first prediction, in some words."""
    first, runs = entry.first(setting), entry.runs(setting)
    of_decode = served.error(first, runs)
    of_prompt = None if first is None else served.prompt_error(first.prompt, runs)
    text = f"served {served.rate(runs):.3g} tokens/s on {runs[0].day}"
    if of_decode is not None:
        text += f", the first prediction was {of_decode:+.0%} off"
    if of_prompt is not None:
        text += f", that of a prompt's speed {of_prompt:+.0%}"
    return text


def judged(
    found: Finding, likely: float, source: str, runs: list[Served], asked: Asked, followed: bool = False
) -> Finding:
    """A note where servers were far slower than the likely rate, tokens a second. source: what that is said to do.
    followed: what is told is by their rate all the same.

    Why is known of this moment only, and of that by who computes now.
    """
    rate = served.rate(runs)
    if likely / rate - 1 <= FAR:
        return found
    cost = f"{plural(len(runs), 'server')} of it made {rate:.3g} tokens/s where {likely:.3g} {source}"
    if len(runs) < BELIEVED and not followed:
        cost += f"; followed once {BELIEVED} servers were so slow"
    now = Computing.from_json(asked.known.get("cpu.load", {}))
    if who := now.who():
        return found.but("note", cost, f"end what computes now, which is {who}, and look again")
    return found.but("note", cost, "look again in some minutes; ft doctor tells what slows this machine down")


def said(made: Speed) -> str:
    """In some words."""
    decode, prompt = made.decode, made.prompt
    rates = f"{decode.low:.3g} to {decode.high:.3g} tokens/s"
    return f"{rates}, {plural(made.tokens, 'token')} of a first prompt in {prompt.low:.2g} to {prompt.high:.2g} s"


def _data(made: Speed, expected: Hits, foreseen: Hits) -> dict[str, Any]:
    return {
        "tokens_per_second": asdict(made.decode),
        "prompt_seconds": asdict(made.prompt),
        "prompt_tokens": made.tokens,
        "hits": asdict(expected),
        "foretold": asdict(foreseen),
        "decode_terms": [_term(term) for term in made.decode_terms],
        "prompt_terms": [_term(term) for term in made.prompt_terms],
    }


def _term(term: Term) -> dict[str, Any]:
    return asdict(term)
