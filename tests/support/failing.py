"""The scripted model on a GPU that fails: named in FT_PLUGINS, it raises what torch and Triton raise when told to.

A prompt that has one of the words of `ERRORS` in it is what makes a step fail, once all of it is there.
"""

from __future__ import annotations

import torch

from ftengine.core import Batch, CacheTensors
from ftengine.models import base
from tests.support.scripted import ARCHITECTURE, ScriptedModel

ERRORS = {
    "EXHAUST-MEMORY": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "FAIL-A-LAUNCH": RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    "LOSE-THE-DEVICE": torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors"
    ),
}


class FailingModel(ScriptedModel):
    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        for sequence in batch.sequences:
            prompt = self._tokenizer.decode(sequence.request.prompt, skip_special_tokens=False)
            for word, error in ERRORS.items():
                if word in prompt:
                    raise error
        return super().forward(batch, cache)


base.register(ARCHITECTURE, lambda checkpoint, options: FailingModel(checkpoint))
