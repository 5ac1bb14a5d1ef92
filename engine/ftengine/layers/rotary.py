"""Rotary position embedding, full or over the first part of each head, with the scalings checkpoints ask for.

Sources: RoPE https://arxiv.org/abs/2104.09864, position interpolation https://arxiv.org/abs/2306.15595,
YaRN https://arxiv.org/abs/2309.00071; "llama3" as in Llama 3.1's reference code. Pairs are (i, i + R/2), the
order in which Hugging Face checkpoints keep the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeScaling:
    """One checkpoint's rotary settings. `kind`: default, linear, llama3 or yarn."""

    theta: float
    rotary_dim: int  # R, even, at most the head's size
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # positions seen in training before scaling; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: correction range in whole dimensions
    attention_factor: float = 1.0  # yarn: scales cosine and sine


class Rotary:
    """Turns positions into cosine and sine tables, and queries and keys by them."""

    def __init__(self, scaling: RopeScaling) -> None:
        self.frequencies = inverse_frequencies(scaling)  # [R/2] float32
        self.attention_factor = scaling.attention_factor

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cosine and sine, each [T, 1, R/2] float32. Once per step, for all layers."""
        angles = positions.float()[:, None, None] * self.frequencies
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """heads [T, heads, D] -> the same in float32, the first R of the D dimensions turned."""
    half = cosine.shape[-1]
    out = heads.to(torch.float32, copy=True)
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    out[..., :half] = first * cosine - second * sine
    out[..., half : 2 * half] = second * cosine + first * sine
    return out


def inverse_frequencies(scaling: RopeScaling) -> torch.Tensor:
    """[R/2] float32."""
    exponents = torch.arange(0, scaling.rotary_dim, 2, dtype=torch.float32) / scaling.rotary_dim
    frequencies = 1.0 / (scaling.theta**exponents)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # full turns over the training context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    def dimension(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the training context."""
        return (
            scaling.rotary_dim
            * math.log(scaling.original_context / (turns * 2 * math.pi))
            / (2 * math.log(scaling.theta))
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, scaling.rotary_dim - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return frequencies * (1 - interpolated + interpolated / scaling.factor)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's temperature on the logits, as the square root that cosine and sine each carry."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)
