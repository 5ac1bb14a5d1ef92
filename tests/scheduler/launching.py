"""The tests' model as one that computes beside the host: logits are there when a step is collected, not before."""

from __future__ import annotations

import torch

from ftengine.core import Batch, CacheTensors
from tests.scheduler.tiny import TinyModel


class LaunchingModel(TinyModel):
    """happened: "launch" and "collect", in order, and what else a test puts there."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.happened: list[str] = []
        self.launch_error: Exception | None = None
        self.collect_error: Exception | None = None

    def launch(self, batch: Batch, cache: CacheTensors, sampler) -> _Pending:
        assert self.happened.count("launch") == self.happened.count("collect"), "two steps at once"
        if self.launch_error is not None:
            raise self.launch_error
        logits = torch.full((len(batch.logits_rows), self.vocab_size), torch.nan)
        pending = _Pending(self, batch, cache, logits, sampler(logits))
        self.happened.append("launch")
        return pending


class _Pending:
    def __init__(self, model: LaunchingModel, batch: Batch, cache: CacheTensors, logits, found) -> None:
        self.model, self.batch, self.cache, self.logits, self.found = model, batch, cache, logits, found

    def collect(self):
        self.model.happened.append("collect")
        if self.model.collect_error is not None:
            raise self.model.collect_error
        self.logits.copy_(self.model.forward(self.batch, self.cache))
        return self.found
