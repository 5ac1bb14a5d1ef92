"""Compares a model on the GPU with plain torch on the same weights: each layer of a decode step, and last logits.

    python -m ftengine.bench.gpu_check MODEL [--strategy hybrid --slots-percent 25 --dtype bfloat16]

For beside a timed run: random weights can hide work that was skipped. Every layer of the step is held against the
formula on what that layer itself was given and remembered, so that errors do not add up. The logits, of a prompt and of
the step after it, are held against a whole float32 pass, beside one whose activations are rounded as the GPU's are. The
exit status is 1 where something differs by more than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_check", __doc__)

import torch

from ftengine.bench.torch_reference import Past, Reference
from ftengine.cache.tensors import allocate_cache
from ftengine.config import EngineConfig
from ftengine.core import Batch, CacheTensors, Request, SamplingParams, Sequence
from ftengine.errors import FtError
from ftengine.kernels.triton.tuning import use_cache
from ftengine.memory.folders import cache_folder, use_kernel_cache
from ftengine.memory.plan import lane_threads
from ftengine.models.base import ModelOptions, load
from ftengine.models.build import DTYPES
from ftengine.models.gpu.decode_step import decode_step
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.inputs import InputBuffers
from ftengine.models.gpu.setup import GpuSetup
from ftengine.models.gpu.weights import DeviceDeltaNet, DeviceMoe
from ftengine.models.gpu.workspace import DecodeBuffers, Workspace
from ftengine.scheduler.batch import BatchBuilder, Work
from ftengine.scheduler.lanes import pin_banks
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source

PAGE_SIZE, CONTEXT = 16, 512
PROMPT = 9  # tokens; one more is decoded
LAYER_ERROR = {"bfloat16": 2e-2, "float32": 1e-3}  # of a layer's output, relative; rounding makes 0.3 %
LOGITS_ERROR = 2.0  # times what rounding makes in torch: both are one draw of the same noise
LEAST_ERROR = 1e-3  # of the logits' deviation, where rounding makes none


@dataclass
class Found:
    """What a decode step did. residual: before the first mixer, then before and after every feed-forward, [H] each."""

    residual: list[torch.Tensor] = field(default_factory=list)
    past: list[Past] = field(default_factory=list)  # of each layer, before the step
    head: torch.Tensor | None = None  # its logits


class Recorder:
    """DecodeExperts that keeps what the residual stream is around them. There must be no dense feed-forward."""

    def __init__(self, model: GpuDecoder, found: Found) -> None:
        self._inner, self._found = model.experts, found
        self.asking, self.forms = self._inner.asking, self._inner.forms  # of DecodeExperts; not used here

    def decode(self, layer: DeviceMoe, buffers: DecodeBuffers) -> None:
        self._found.residual.append(buffers.residual[0].clone())
        self._inner.decode(layer, buffers)
        self._found.residual.append(buffers.residual[0].clone())

    def end_layers(self) -> None:
        self._inner.end_layers()

    def end_step(self) -> None:
        self._inner.end_step()


class Run:
    """One sequence of fixed tokens over the model, as the engine computes it."""

    def __init__(self, model: GpuDecoder, cache: CacheTensors) -> None:
        self.model, self.cache = model, cache
        self.tokens = [7919 * number % model.vocab_size for number in range(PROMPT + 1)]
        self._batches = BatchBuilder(PAGE_SIZE)

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[V] after the prompt, and after the step that follows, from its graph."""
        sequence = self._sequence()
        prompt = self.model.forward(self._batches.build([Work(sequence, PROMPT)]), self.cache)[-1].cpu()
        return prompt, self.model.forward(self._next(sequence), self.cache)[-1].cpu()

    def recorded(self) -> Found:
        """The same step once more, its kernels launched one by one."""
        sequence, found, model = self._sequence(), Found(), self.model
        model.forward(self._batches.build([Work(sequence, PROMPT)]), self.cache)
        found.past = [self._past(layer.mixer.cache_index, layer.mixer) for layer in model.weights.layers]
        inputs = InputBuffers(1, CONTEXT // PAGE_SIZE, model.device)
        inputs.fill(self._next(sequence))
        buffers = Workspace(model.weights, 1, CONTEXT).of(1)
        model.experts.wake()
        with torch.no_grad():
            decode_step(model.weights, self.cache, inputs.views(1), buffers, Recorder(model, found))
        found.head = buffers.logits[0].cpu()
        model.experts.check()
        found.residual = [row.cpu() for row in found.residual]
        return found

    def _sequence(self) -> Sequence:
        params = SamplingParams(max_tokens=16, temperature=0.0)
        return Sequence(Request("check", [], params), self.tokens[:PROMPT], pages=[0], state_slot=0)

    def _next(self, sequence: Sequence) -> Batch:
        sequence.computed += PROMPT
        sequence.tokens.append(self.tokens[PROMPT])
        return self._batches.build([Work(sequence, 1)])

    def _past(self, index: int, mixer: object) -> Past:
        if isinstance(mixer, DeviceDeltaNet):
            states = self.cache.states[index]
            return Past(*(states[name][0].float().cpu().clone() for name in ("window", "delta")))
        return Past(*(part[index][0, :PROMPT].float().cpu() for part in (self.cache.keys, self.cache.values)))


@dataclass
class Compared:
    """Relative errors by what was compared, and what the whole pass gives. logits: [V], float32 and rounded."""

    mixers: dict[str, float] = field(default_factory=dict)
    experts: dict[str, float] = field(default_factory=dict)
    head: float = 0.0
    exact: list[torch.Tensor] = field(default_factory=list)
    rounded: list[torch.Tensor] = field(default_factory=list)


def compare(reference: Reference, tokens: list[int], found: Found, act: torch.dtype | None) -> Compared:
    """tokens: the prompt and the one that was decoded."""
    made = Compared()
    streams = [reference.embed(tokens), reference.embed(tokens)]  # without and with rounding
    given = streams[0][-1:]
    for index in range(reference.config.num_hidden_layers):
        layer = reference.layer(index)
        before, after = (row[None].to(reference.device) for row in found.residual[2 * index : 2 * index + 2])
        past = Past(*(part.to(reference.device) for part in (found.past[index].first, found.past[index].second)))
        name = f"layer {index}, {'Gated DeltaNet' if layer.recurrent else 'attention'}"
        made.mixers[name] = difference(before - given, layer.mix(given, past, act)[0])
        made.experts[f"layer {index}"] = difference(after - before, layer.feed(before, act))
        given = after
        for stream, rounding in zip(streams, (None, act), strict=True):
            stream += layer.mix(stream, None, rounding)[0]
            stream += layer.feed(stream, rounding)
    assert found.head is not None
    made.head = difference(found.head[None].to(reference.device), reference.logits(given, act))
    made.exact, made.rounded = (
        list(reference.logits(s[-2:], r).cpu()) for s, r in zip(streams, (None, act), strict=True)
    )
    return made


def difference(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, of vectors."""
    return float((ours - exact).norm() / exact.norm())


def main(arguments: list[str] | None = None) -> int:
    options = parse("gpu_check", __doc__, arguments)
    start = time.perf_counter()
    checkpoint = Checkpoint.open(options.model)
    act = None if options.dtype == "float32" else DTYPES[options.dtype]
    tokens, logits, found = _computed(checkpoint, options)
    if options.device == "cuda":
        torch.cuda.empty_cache()  # of the model, which is gone
    computed = time.perf_counter()
    with open_source(checkpoint) as source:
        where = "cuda" if options.device == "cuda" else "cpu"
        with torch.no_grad():
            made = compare(Reference(checkpoint, source, where), tokens, found, act)
    limit = LAYER_ERROR[options.dtype]
    fine = [_worst("mixers", made.mixers, limit), _worst("experts", made.experts, limit)]
    fine.append(_worst("head", {"of the step": made.head}, limit))
    for name, ours, exact, rounded in zip(("prompt", "decode"), logits, made.exact, made.rounded, strict=True):
        fine.append(_logits(name, ours, exact, rounded))
    seconds = f"{computed - start:.1f} s on the GPU, {time.perf_counter() - computed:.1f} s in torch"
    print(f"{'ok' if all(fine) else 'WRONG'}: {len(made.mixers)} layers, {options.strategy}, {seconds}")
    return 0 if all(fine) else 1


def _computed(
    checkpoint: Checkpoint, options: argparse.Namespace
) -> tuple[list[int], tuple[torch.Tensor, torch.Tensor], Found]:
    model = _loaded(checkpoint, options)
    # Closed in this order, and before the memory is the reference's.
    with closing(pin_banks(model.banks, model.device)) as pinned, closing(model):
        run = Run(model, _prepared(model, options, readable=pinned.outcome.value))
        return run.tokens, run.logits(), run.recorded()


def _loaded(checkpoint: Checkpoint, options: argparse.Namespace) -> GpuDecoder:
    use_kernel_cache()
    use_cache(cache_folder())
    loaded = load(checkpoint, ModelOptions(options.dtype, device=options.device))
    if not isinstance(loaded, GpuDecoder) or len(loaded.weights.moes) != len(loaded.weights.layers):
        raise SystemExit(f"{checkpoint.architecture} has layers without experts: they are not compared here")
    return loaded


def _prepared(model: GpuDecoder, options: argparse.Namespace, *, readable: bool) -> CacheTensors:
    total = sum(bank.experts for bank in model.banks.values())
    model.prepare(
        GpuSetup(
            options.strategy,
            max_running=1,
            context=CONTEXT,
            page_size=PAGE_SIZE,
            slots=0 if options.strategy == "cpu" else total * options.slots_percent // 100,
            staging=min(128, 2 * model.banks[0].experts),
            threads=options.threads or lane_threads(EngineConfig(str(options.model))).value,
            readable=readable,
        )
    )
    cache = allocate_cache(model.cache_layout, CONTEXT // PAGE_SIZE, PAGE_SIZE, 1, options.device)
    model.warm_up(cache, lambda stage, done: None)
    return cache


def _worst(what: str, errors: dict[str, float], limit: float) -> bool:
    name = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    fine = errors[name] <= limit
    print(f"{what}: {errors[name]:.2%} off at the most ({name}){'' if fine else f', more than {limit:.2%}'}")
    return fine


def _logits(name: str, ours: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> bool:
    spread = float(exact.std())
    error, theirs = (float((each - exact).abs().median()) / spread for each in (ours, rounded))
    fine = error <= LOGITS_ERROR * theirs + LEAST_ERROR
    divergence = float((exact.softmax(-1) * (exact.log_softmax(-1) - ours.log_softmax(-1))).sum())
    same = "the same" if int(ours.argmax()) == int(exact.argmax()) else "another"
    print(
        f"{name}: logits {error:.4f} deviations off (median; rounding in torch {theirs:.4f}), KL {divergence:.1e}, "
        f"{same} likeliest token{'' if fine else ': WRONG'}"
    )
    return fine


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FtError as error:
        sys.exit(f"Error: {error}\nTry:   {error.next_step or 'ft doctor'}")
