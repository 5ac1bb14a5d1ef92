"""Decode speed and first-prompt time, predicted from a model's sizes and a machine's bandwidths: what is read, by what.

A decoded token takes D / B_V + h * T / B_V + L * tau + lanes((1 - h) * T): D the dense bytes that it reads, T its
routed experts' bytes, h the share of them in slots, B_V the bandwidth of the memory that the device reads, L layers and
tau what a layer takes however little it reads. Of the experts without a slot some are copied into one while the layer
before is computed, and take what that does not hide. On the CPU everything is read from host memory: (D + T) / B_H +
L * tau.
docs/fit.md says where the shares, times and hit rates below were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from ftengine.models.gpu.strategy import LAYER, Lanes, Missing, Strategy, missing_experts
from ftlaunch.machine.fit import Fit, Model
from ftlaunch.machine.hits import NO_FORESIGHT, Hits
from ftlaunch.machine.kernel_rate import KernelRate
from ftlaunch.machine.verdict import plural, rate

CONTEXT = 512  # tokens before the one that is decoded, also of the first prompt; fewer where fewer fit: prompt_of()
PROMPTS = (64, 128, 256, 512, 1024, 2048)  # tokens of prompts whose likely times are told, too
WIDEST = 2.0  # a range's upper end, as a multiple of the lower one


@dataclass(frozen=True)
class Span:
    """low <= likely <= high."""

    low: float
    likely: float
    high: float

    def times(self, factor: float) -> Span:
        return Span(self.low * factor, self.likely * factor, self.high * factor)

    def narrow(self) -> Span:
        """At most WIDEST wide: as much is cut off at either end, as factors, and `likely` stays within."""
        low, high = max(self.low, self.likely / WIDEST), min(self.high, self.likely * WIDEST)
        beyond = math.sqrt(max(1.0, high / low / WIDEST))
        return Span(low * beyond, self.likely, high / beyond)


# Of a time for bytes at the bandwidth that the doctor measures, and of a fixed time
STREAM = Span(0.90, 1.05, 1.30)
HOST = Span(0.85, 1.05, 1.65)  # of host memory: a virtual machine's may be faster or far slower a minute later
FIXED = Span(0.70, 1.00, 1.45)
LANES, ROUGH_LANES = Span(0.90, 1.00, 1.15), Span(0.78, 1.00, 1.25)  # of missing experts' time
CPU_LAYER, CPU_STEP = 0.1, 0.35  # ms
CPU_PROMPT_LAYER = 1.0  # ms of a step with prompt tokens
GPU_LAYER = LAYER / 1e3  # ms of a decode step
GPU_PROMPT_LAYER = 3.4  # ms of a step with prompt tokens, whatever their number up to some hundred
OVERLAP = 0.5  # of the shorter one of computing and fetching is not hidden behind the longer one
COMPUTE = Span(0.75, 1.0, 1.4)
# Products a second of one core in prompts, by the version of the kernels; of `portable` nothing was measured. Of AVX2,
# which is the version of many kinds of processors, and bytes below, where this machine's were not
CORE_PRODUCTS = {"amx": 60e9, "avx512_bf16": 95e9, "avx512": 45e9, "avx2": 25e9}
# Bytes a second of FP8 and FP4 weights that one core computes with, where that may be less than it reads
CORE_BYTES = {"avx512": 8e9, "avx2": 7e9}


@dataclass(frozen=True)
class Machine:
    """What a prediction needs of it. Bytes a second; None for what is not known.

    host: read by all threads; lane: by those that compute experts; device: by the GPU of its own memory; link: to the
    GPU. threads: of `lane`.
    """

    host: float | None = None
    lane: float | None = None
    device: float | None = None
    link: float | None = None
    threads: int = 1
    kernels: str = "avx2"
    computes: KernelRate | None = None  # those threads, where it was measured

    @property
    def products(self) -> float:
        """A second, in prompts. Of kernels in CORE_PRODUCTS."""
        return self.threads * CORE_PRODUCTS[self.kernels] if self.computes is None else self.computes.products

    @property
    def unpacked(self) -> float:
        """Bytes of FP8 and FP4 weights a second that it can compute with, were they there at once."""
        if self.computes is not None:
            return self.computes.bytes
        return self.threads * CORE_BYTES.get(self.kernels, math.inf)


@dataclass(frozen=True)
class Term:
    """A part of the time. bytes and bandwidth: None where it is not made of them. ms: low, likely, high.

    words: what more there is to tell of it, a sentence. legend: what the formula's symbols stand for, and their values.
    """

    name: str
    formula: str
    ms: Span
    bytes: float | None = None
    bandwidth: float | None = None
    words: str = ""
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Speed:
    """decode: tokens a second of one sequence; prompt: seconds until the first token, of `tokens` cold ones.

    prompts: the likely seconds of other lengths, by tokens, whatever context there is: another server's may be longer.
    """

    decode: Span
    prompt: Span
    decode_terms: tuple[Term, ...]
    prompt_terms: tuple[Term, ...]
    prompts: tuple[tuple[int, float], ...] = ()
    tokens: int = CONTEXT


def predict(
    model: Model, fit: Fit, machine: Machine, hits: Hits, lanes: Lanes | None = None, foretold: Hits = NO_FORESIGHT
) -> Speed | None:
    """Before anything was served. None where the machine's bandwidth is not known, or the model does not fit.

    hits: share of a token's experts in slots. lanes: what experts without a slot cost on this machine. foretold: share
    of those that are copied into slots while the layer before is computed.
    """
    if not fit.fits:
        return None
    tokens = prompt_of(fit)
    if fit.device == "cpu":
        if not machine.lane or machine.kernels not in CORE_PRODUCTS:
            return None
        host = computed_with(model, machine, machine.lane)
        decode, of_prompt = _cpu_decode(model, host, tokens), partial(_cpu_prompt, model, machine, host)
    else:
        resident = fit.strategy is None or fit.strategy.strategy == "resident"
        if not machine.device or not (resident or lanes):
            return None
        decode = _gpu_decode(model, fit, machine.device, hits, lanes, foretold, tokens)
        of_prompt = partial(_gpu_prompt, model, fit, machine.link)
    step, prompt = total(decode), of_prompt(tokens)
    rates = Span(1e3 / step.high, 1e3 / step.likely, 1e3 / step.low)
    prompts = tuple((tokens, total(of_prompt(tokens)).likely / 1e3) for tokens in PROMPTS)
    return Speed(rates.narrow(), total(prompt).times(1e-3).narrow(), decode, prompt, prompts, tokens)


def computed_with(model: Model, machine: Machine, bandwidth: float) -> float:
    """Bytes a second of the model's experts that the CPU's threads compute with, where so many could be read."""
    narrow = model.layout is not None and model.layout.gate_up.bits < 16
    return min(bandwidth, machine.unpacked) if narrow else bandwidth


def prompt_of(fit: Fit) -> int:
    """Tokens of the first prompt that is predicted: CONTEXT, or all that leave room for one of the answer."""
    return max(1, min(CONTEXT, fit.context - 1)) if fit.context else CONTEXT


def total(terms: Iterable[Term]) -> Span:
    """ms."""
    spans = [term.ms for term in terms]
    return Span(sum(span.low for span in spans), sum(span.likely for span in spans), sum(span.high for span in spans))


def dense_bytes(model: Model, tokens: int = CONTEXT) -> int:
    """D: read by every token, behind so many. The state of recurrent layers is read and written."""
    return model.sizes.dense - model.embedding + 2 * model.demand.state + tokens * model.demand.token


def routed_bytes(model: Model) -> int:
    """T = layers * experts a token * bytes of an expert."""
    return model.sizes.layers * model.demand.top_k * model.sizes.block


def layers(model: Model) -> int:
    found = model.text_config.get("num_hidden_layers")
    return found if isinstance(found, int) else model.sizes.layers


def _stream(
    name: str, formula: str, size: float, bandwidth: float, share: Span = STREAM, *legend: tuple[str, str]
) -> Term:
    return Term(name, formula, share.times(size / bandwidth * 1e3), size, bandwidth, legend=legend)


def _layers(model: Model, formula: str, ms: float) -> Term:
    """What they take however little they read. ms: of one."""
    count, symbol = layers(model), formula.rpartition(" ")[2]
    legend = ("L", f"layers: {count}"), (symbol, f"a layer's time however little it reads: {ms:.3g} ms")
    return Term("layers", formula, FIXED.times(count * ms), legend=legend)


def _device(bandwidth: float) -> tuple[str, str]:
    return "B_V", f"what is read of the GPU's memory: {rate(bandwidth)}"


def _host(bandwidth: float) -> tuple[str, str]:
    return "B_H", f"what the threads read of host memory: {rate(bandwidth)}"


def _dense(size: int) -> tuple[str, str]:
    return "D", f"dense weights, state, keys and values that a token reads: {size / 1e6:,.0f} MB"


def _slots(hits: Hits) -> tuple[str, str]:
    return "h", f"share of a token's experts that have a slot: {hits.likely:.0%}"


def _routed(model: Model) -> tuple[str, str]:
    return "T", f"the experts of a token: {routed_bytes(model) / 1e6:,.0f} MB"


def _cpu_decode(model: Model, host: float, tokens: int) -> tuple[Term, ...]:
    size = dense_bytes(model, tokens)
    return (
        _stream("dense weights, state", "D / B_H", size, host, HOST, _dense(size), _host(host)),
        _stream("experts", "T / B_H", routed_bytes(model), host, HOST, _routed(model)),
        _layers(model, "L * tau", CPU_LAYER),
        Term("step", "tau_s", FIXED.times(CPU_STEP), legend=(("tau_s", f"a step's own time: {CPU_STEP:.3g} ms"),)),
    )


def _cpu_prompt(model: Model, machine: Machine, host: float, tokens: int) -> tuple[Term, ...]:
    products = machine.products
    touched = model.sizes.dense - model.embedding + _touched(model, tokens) * model.sizes.banks
    legend = (
        ("n", f"tokens of the prompt: {tokens}"),
        ("P", f"products that a token takes: {model.products / 1e6:,.0f} million"),
        ("F", f"products a second of {plural(machine.threads, 'thread')}: {products / 1e9:,.0f} billion"),
    )
    compute = Term("computing", "n * P / F", COMPUTE.times(tokens * model.products / products * 1e3), legend=legend)
    meets = "W", f"weights that the prompt meets: {touched / 1e6:,.0f} MB"
    weights = _stream("weights", "W / B_H", touched, host, HOST, meets, _host(host))
    return compute, weights, _layers(model, "L * tau", CPU_PROMPT_LAYER)


def _touched(model: Model, tokens: int) -> float:
    """Share of all experts that a prompt meets, were they chosen evenly."""
    if not model.sizes.experts:
        return 0.0
    return 1.0 - (1.0 - min(1.0, model.demand.top_k / model.sizes.experts)) ** tokens


def _gpu_decode(
    model: Model, fit: Fit, device: float, hits: Hits, lanes: Lanes | None, foretold: Hits, tokens: int
) -> tuple[Term, ...]:
    routed, size = routed_bytes(model), dense_bytes(model, tokens)
    terms = [_stream("dense weights, state", "D / B_V", size, device, STREAM, _dense(size), _device(device))]
    strategy: Strategy = fit.strategy.alone if fit.strategy is not None else "resident"
    found = Hits(1.0, 1.0, 1.0) if strategy == "resident" else hits
    if found.likely:
        slots = _routed(model), _slots(found)
        terms.append(_stream("experts in slots", "h T / B_V", found.likely * routed, device, STREAM, *slots))
    terms.append(_layers(model, "L * tau", GPU_LAYER))
    if strategy != "resident" and lanes is not None:
        hidden = total(terms).likely * 1e3 / model.sizes.layers
        terms.append(_missing(model, strategy, found, lanes, foretold, hidden))
    return tuple(terms)


def _missing(model: Model, strategy: Strategy, hits: Hits, lanes: Lanes, foretold: Hits, hidden: float) -> Term:
    """A layer's experts without a slot: by the lanes' costs, and what copies of foretold ones take beside `hidden`, the
    microseconds of the layer's other work. The span is that of all ends of hits and foresight.
    """
    count, top_k = model.sizes.layers, model.demand.top_k

    def of(found: float, named: float) -> Missing:
        return missing_experts(strategy, top_k, 1.0 - found, lanes, named, hidden)

    likely = of(hits.likely, foretold.likely)
    ends = [of(found, named).us for found in (hits.low, hits.high) for named in (foretold.low, foretold.high)]
    around = ROUGH_LANES if lanes.rough else LANES
    low, high = around.low * min(likely.us, *ends), around.high * max(likely.us, *ends)
    span = Span(low, likely.us, high).times(count / 1e3)
    size = (1.0 - hits.likely) * routed_bytes(model)
    bandwidth = size / span.likely * 1e3 if span.likely else None
    words = _foreseen(likely, (1.0 - hits.likely) * top_k, foretold, hidden) if likely.copied else ""
    lanes_take = "lanes", "the time of experts without a slot: over the link, on the CPU, or both"
    legend = lanes_take, _slots(hits), _routed(model)
    return Term("missing experts", "lanes((1-h) T)", span, size, bandwidth, words, legend)


def _foreseen(likely: Missing, missing: float, foretold: Hits, hidden: float) -> str:
    source = "counted" if foretold.counted else "stated"
    return (
        f"of {missing:.2f} missing experts a layer {likely.copied:.2f} are foretold and copied before it begins "
        f"({foretold.likely:.0%} {source}, {foretold.low:.0%} to {foretold.high:.0%}): what is left takes "
        f"{likely.left:.1f} us, and the copies {likely.late:.1f} us that are not hidden behind the layer's other "
        f"{hidden:.0f} us"
    )


def _gpu_prompt(model: Model, fit: Fit, link: float | None, tokens: int) -> tuple[Term, ...]:
    """Experts without a slot cross the link once, behind and beside what is computed."""
    computing = replace(_layers(model, "L * tau_p", GPU_PROMPT_LAYER), name="computing")
    compute, terms = computing.ms, [computing]
    absent = model.sizes.total - fit.slots if fit.strategy is not None and fit.strategy.strategy != "resident" else 0
    if absent and link:
        size = absent * model.sizes.block * _touched(model, tokens)
        whole = STREAM.times(size / link * 1e3)
        longer, shorter = max(compute.likely, whole.likely), min(compute.likely, whole.likely)
        beyond = longer + OVERLAP * shorter - compute.likely
        legend = (("beside", "experts without a slot cross the link, half hidden behind computing"),)
        span = whole.times(beyond / whole.likely)
        terms.append(Term("experts fetched", "beside", span, size, link, legend=legend))
    return tuple(terms)
