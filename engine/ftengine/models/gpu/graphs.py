"""Decode steps of every batch size, in every form: captured as CUDA graphs while warming up, replayed with one launch
afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ftengine.core import Batch, CacheTensors
from ftengine.kernels.triton.precompile import kinds
from ftengine.kernels.triton.tuning import tuning
from ftengine.models.gpu.decode_step import DecodeExperts, decode_step
from ftengine.models.gpu.inputs import InputBuffers
from ftengine.models.gpu.weights import DeviceWeights
from ftengine.models.gpu.workspace import Workspace

log = logging.getLogger("ftengine.graphs")

Progress = Callable[[str, float], None]
STAGE = "capturing decode steps"


class DecodeSteps:
    """Steps of up to `tokens` sequences. context: tokens of a sequence, in pages of `page_size`.

    Without a graph for a batch, as under the interpreter, the same launches are made one by one.
    """

    def __init__(
        self, weights: DeviceWeights, experts: DecodeExperts, tokens: int, context: int, page_size: int
    ) -> None:
        self.tokens = tokens
        self._weights = weights
        self._experts = experts
        self._inputs = InputBuffers(tokens, -(-context // page_size), weights.device)
        self._workspace = Workspace(weights, tokens, self._inputs.pages * page_size)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by sequences, and whether they may ask
        self._captured: CacheTensors | None = None

    def takes(self, batch: Batch) -> bool:
        """Whether every sequence has one token, there are few enough, their pages fit, and no state is captured."""
        rows = len(batch.sequences)
        fits = rows <= self.tokens and batch.page_table.shape[1] <= self._inputs.pages
        return fits and len(batch.input_ids) == rows and not batch.captures

    def run(self, batch: Batch, cache: CacheTensors, ids: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Queues the step. Returns float32 logits [B, V] in a buffer that the next step overwrites.

        ids: as in models.base.LaunchingAhead.
        """
        assert not batch.captures, "a decode step keeps no states in the middle: its launches are fixed"
        self._inputs.fill(batch)
        if ids is not None:
            ids(self._inputs.views(len(batch.sequences)).ids)
        return self.again(len(batch.sequences), cache)

    def again(self, rows: int, cache: CacheTensors) -> torch.Tensor:
        """`run` with the inputs that are there already; for measuring."""
        graph = self._graphs.get((rows, self._experts.asking))
        if graph is not None and cache is self._captured:
            graph.replay()
        else:
            self._launch(rows, cache)
        return self._workspace.of(rows).logits

    def rehearse(self, weights: DeviceWeights, cache: CacheTensors) -> None:
        """The launches of each number of sequences, for precompile.py, which makes none of them.

        weights: a sample of this model's.
        """
        self._launch_some(range(self.tokens, 0, -1), cache, weights)

    def capture(self, cache: CacheTensors, progress: Progress, samples: DeviceWeights | None = None) -> None:
        """A graph for each number of sequences, over this cache; what is not compiled and tuned yet is so before.

        cache: as `allocate_cache` makes it for a device: its last page and slot are written. samples: of this model's
        weights; where they launch every kernel that all layers do, only their launches are made before.
        """
        start = time.perf_counter()
        first = samples if samples is not None and self._launches_all(samples, cache) else None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        pool = None
        steps = [(rows, asking) for rows in range(self.tokens, 0, -1) for asking in self._experts.forms(rows)]
        for done, (rows, asking) in enumerate(steps):
            progress(STAGE, done / len(steps))
            with self._form(asking):
                with torch.cuda.stream(stream):
                    self._inputs.fill_spare(rows, cache)
                    with tuning():
                        self._launch(rows, cache, first)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self._launch(rows, cache)
            pool = graph.pool()
            self._graphs[rows, asking] = graph
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._captured = cache
        log.info("decode steps of up to %d sequences captured in %.1f s", self.tokens, time.perf_counter() - start)

    def _launches_all(self, samples: DeviceWeights, cache: CacheTensors) -> bool:
        """A kernel that is first launched while a graph is captured would have to be loaded there."""

        def launched(weights: DeviceWeights) -> set[Hashable]:
            # One token goes another way than several.
            return kinds(partial(self._launch_some, (self.tokens, 1), cache, weights))

        try:
            return launched(self._weights) <= launched(samples)
        except Exception:
            log.debug("all layers are launched before graphs are captured", exc_info=True)
            return False

    def _launch_some(self, numbers: Iterable[int], cache: CacheTensors, weights: DeviceWeights) -> None:
        for rows in numbers:
            for asking in self._experts.forms(rows):
                with self._form(asking):
                    self._launch(rows, cache, weights)

    @contextmanager
    def _form(self, asking: bool) -> Iterator[None]:
        before, self._experts.asking = self._experts.asking, asking
        try:
            yield
        finally:
            self._experts.asking = before

    def _launch(self, rows: int, cache: CacheTensors, weights: DeviceWeights | None = None) -> None:
        inputs, workspace = self._inputs.views(rows), self._workspace.of(rows)
        decode_step(weights or self._weights, cache, inputs, workspace, self._experts)
