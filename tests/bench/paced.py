"""The scripted model at a pace that tests know: named in FT_PLUGINS, it takes as long as they told it to.

A decode step takes PACE_STEP seconds and a token of a prompt PACE_TOKEN, both times --threads. Its answer never
ends by itself.
"""

from __future__ import annotations

import os
import time

import torch

from ftengine.core import Batch, CacheTensors
from ftengine.models import base
from ftengine.models.base import ModelOptions
from ftengine.weights.checkpoint import Checkpoint
from tests.support.scripted import ARCHITECTURE, ScriptedModel

WORDS = " word" * 2000


class PacedModel(ScriptedModel):
    def __init__(self, checkpoint: Checkpoint, options: ModelOptions) -> None:
        super().__init__(checkpoint)
        self._script = lambda prompt: WORDS
        self._step = float(os.environ["PACE_STEP"]) * options.threads
        self._token = float(os.environ["PACE_TOKEN"]) * options.threads

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        logits = super().forward(batch, cache)
        read = sum(length for length in batch.query_lengths if length > 1)
        time.sleep(self._token * read if read else self._step)
        return logits


base.register(ARCHITECTURE, PacedModel)
