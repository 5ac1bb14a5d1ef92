"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467), computed in float32 whatever comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    weight: [H] float32, or [heads, H] for one weight a head. Checkpoints of the "1 + w" form have their one added
    when they are loaded, so that there is a single form here.
    """

    weight: torch.Tensor
    epsilon: float
    dtype: torch.dtype  # of the result

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 1:
            return F.rms_norm(hidden.float(), self.weight.shape, self.weight, self.epsilon).to(self.dtype)
        normed = F.rms_norm(hidden.float(), self.weight.shape[-1:], None, self.epsilon)
        return normed.mul_(self.weight).to(self.dtype)
