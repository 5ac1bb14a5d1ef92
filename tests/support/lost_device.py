"""A GPU that is really lost: named in FT_PLUGINS, it makes a step fail on the device when it has TOKEN twice in a row.

An index out of bounds stops torch's kernel by an assertion; the context is of no use afterwards, and every later call
reports it again. That is how an illegal address or a lost device shows, too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ftengine.core import Batch, CacheTensors
from ftengine.models.gpu.decoder import GpuDecoder

TOKEN = 5

launch = GpuDecoder.launch


def failing(model: GpuDecoder, batch: Batch, cache: CacheTensors, sampler: Any) -> Any:
    if (TOKEN, TOKEN) in pairwise(batch.input_ids.tolist()):
        torch.zeros(1, device=model.device)[torch.full((1,), 1 << 40, device=model.device)].add_(1)
    return launch(model, batch, cache, sampler)


GpuDecoder.launch = failing
