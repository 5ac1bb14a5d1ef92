"""The model on a GPU: decode steps from captured graphs, steps with prefill launched one kernel after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy
import torch

from ftengine.core import Batch, CacheLayout, CacheTensors
from ftengine.experts.pool import ExpertBank
from ftengine.kernels.triton.buffers import DECODE_TOKENS
from ftengine.kernels.triton.delta_prefill import prepare_again
from ftengine.kernels.triton.precompile import precompile
from ftengine.kernels.triton.tuning import listing, tuning
from ftengine.models.base import Found
from ftengine.models.gpu.experts import GpuExperts
from ftengine.models.gpu.graphs import DecodeSteps, Progress
from ftengine.models.gpu.inputs import spare_chunk
from ftengine.models.gpu.prefill import lengths_of_all_kinds, prefill_step
from ftengine.models.gpu.setup import GpuSetup
from ftengine.models.gpu.weights import DeviceWeights

COMPILED = 0.8  # fraction of warming up


@dataclass
class Launched(Generic[Found]):
    """A step that was queued. check: raises what went wrong beside the GPU."""

    result: Found
    done: torch.cuda.Event | None  # None: kernels ran when they were launched
    check: Callable[[], None]

    def collect(self) -> Found:
        if self.done is not None:
            self.done.synchronize()
        self.check()
        return self.result


class GpuDecoder:
    """Fulfils ftengine.models.base.Model and LaunchingAhead. Loaded, then prepared, then (on a GPU) warmed up.

    weights: dense parts, on the device; banks: the routed experts of each MoE layer, in host memory.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        cache_layout: CacheLayout,
        weights: DeviceWeights,
        banks: dict[int, ExpertBank],
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.eos_token_ids = eos_token_ids
        self.cache_layout = cache_layout
        self.weights = weights
        self.banks = banks
        self.steps: DecodeSteps | None = None
        self._experts: GpuExperts | None = None

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def experts(self) -> GpuExperts:
        """Slots, lanes and counters. There once the model is prepared."""
        assert self._experts is not None, "the model is not prepared"
        return self._experts

    def prepare(self, setup: GpuSetup) -> None:
        """Takes the memory that steps need, fills slots, starts the CPU's lane.

        Raises torch.OutOfMemoryError, FtError.
        """
        self.close()
        self._experts = GpuExperts(self.weights, self.banks, setup)
        self.steps = DecodeSteps(self.weights, self._experts, setup.decode_tokens, setup.context, setup.page_size)

    @torch.no_grad()
    def warm_up(self, cache: CacheTensors, progress: Progress, chunk: int = 0) -> None:
        """Compiles and tunes what steps over this cache launch, and captures graphs of decode steps.

        cache: from `allocate_cache` for this device. chunk: the most tokens of a step; what longer steps launch is
        compiled by the first of them. Under the interpreter there is nothing to do.
        """
        assert self.steps is not None, "the model is not prepared"
        if self.device.type == "cuda":
            # The longest first: what it takes is divided among the others.
            lengths = sorted(lengths_of_all_kinds(self.weights, cache.page_size, chunk), reverse=True)
            self._compile(cache, lengths, progress)
            self.experts.wake()
            samples = self.weights.samples()
            self.steps.capture(cache, lambda stage, done: progress(stage, COMPILED + (1 - COMPILED) * done), samples)
            with tuning():
                # One and two tokens were timed with the decode steps; what is timed is the same for layers of a kind.
                for tokens in (length for length in lengths if 2 < length <= DECODE_TOKENS):
                    prefill_step(samples, cache, spare_chunk(cache, tokens), self.experts)
            torch.cuda.synchronize()
            self.experts.check()

    def launch(self, batch: Batch, cache: CacheTensors, sampler: Callable[[torch.Tensor], Found]) -> Launched[Found]:
        """See models.base.Launching."""
        return self._launched(sampler(self._queue(batch, cache)))

    @property
    def rows_ahead(self) -> int:
        """See models.base.LaunchingAhead."""
        return 0 if self.steps is None else self.steps.tokens

    def launch_ahead(
        self,
        batch: Batch,
        cache: CacheTensors,
        ids: Callable[[torch.Tensor], None],
        sampler: Callable[[torch.Tensor], Found],
    ) -> Launched[Found]:
        """See models.base.LaunchingAhead."""
        assert self.steps is not None, "the model is not prepared"
        assert self.steps.takes(batch), "a step that no graph takes cannot be launched ahead"
        self.experts.wake(len(batch.sequences))
        with torch.no_grad():
            logits = self.steps.run(batch, cache, ids)
        return self._launched(sampler(logits))

    def _launched(self, result: Found) -> Launched[Found]:
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Launched(result, done, self.experts.check)

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """See models.base.Model; on the device. Waits."""
        return self.launch(batch, cache, torch.clone).collect()

    def close(self) -> None:
        """Ends the threads of the CPU's lane."""
        if self._experts is not None:
            self._experts.close()
        self._experts = self.steps = None

    def _compile(self, cache: CacheTensors, prompts: Sequence[int], progress: Progress) -> None:
        """Kernels of all decode steps and of prompts of these lengths, many at a time."""
        assert self.steps is not None
        steps, pool, samples = self.steps, self.experts.pool, self.weights.samples()

        def launch() -> None:
            with listing():
                steps.rehearse(samples, cache)
                # Where the host copies what kernels wrote that it shall copy, there is nothing to rehearse.
                for tokens in prompts if pool is None or pool.tensors.readable else ():
                    prefill_step(samples, cache, spare_chunk(cache, tokens), self.experts)

        def say(done: int, count: int) -> None:
            progress(f"compiling kernels {done}/{count}", COMPILED * done / count)

        progress("compiling kernels", 0.0)
        try:
            precompile(launch, say)
        finally:
            prepare_again()
        torch.cuda.synchronize()

    @torch.no_grad()
    def _queue(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """Returns float32 logits [len(batch.logits_rows), V] that are yet to be computed."""
        assert self.steps is not None, "the model is not prepared"
        if not self.steps.takes(batch):
            return prefill_step(self.weights, cache, batch, self.experts)
        self.experts.wake(len(batch.sequences))
        logits = self.steps.run(batch, cache)
        rows = batch.logits_rows.numpy()
        everything = len(rows) == len(logits) and bool((rows == numpy.arange(len(rows))).all())
        return logits if everything else logits[batch.logits_rows.to(logits.device)]
