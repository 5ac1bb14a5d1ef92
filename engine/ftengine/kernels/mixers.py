"""The native mixers, for torch tensors: norm, attention over pages, Gated DeltaNet, routing.

What each computes is defined by the torch layers (ftengine.layers); here everything of a layer that is not a product
with a weight matrix is one call. All tensors are contiguous, on the CPU and without gradient. Sums are float32. No
result depends on `threads`; in its last bits it depends on `isa`, one of `versions()`, by default the one in use.

Raises everywhere: ValueError for shapes, lengths and indices that do not fit together and for an isa that does not run
here, TypeError for a dtype, layout or device that is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ftengine.formats.format import padded
from ftengine.kernels.native import AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_native: Any = None
if AVAILABLE:
    from ftengine import _native


def versions() -> list[str]:
    """Versions usable here, the best first."""
    return list(_native.mixer_versions())


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype, threads: int = 0, isa: str = ""
) -> torch.Tensor:
    """x [T, H] float32, weight [H] float32 -> [T, padded(H)] of `dtype` (float32 or bfloat16)."""
    out = torch.empty(x.shape[0], padded(x.shape[-1]), dtype=dtype)
    _native.rms_norm(x, weight, epsilon, out, threads or torch.get_num_threads(), isa)
    return out


@dataclass(frozen=True)
class Attention:
    """One layer's settings. N query heads, K key/value heads and D dimensions a head as in the cache's tensors.

    norm: [N + K, D] float32, of queries and keys; or None. window: keys that a query sees, itself included; 0: all.
    scale: of the scores; 0: 1 / root(D). gated: outputs are multiplied by the sigmoid of a gate a head.
    """

    heads: int
    norm: torch.Tensor | None = None
    epsilon: float = 0.0
    window: int = 0
    gated: bool = False
    scale: float = 0.0


def attention(
    layer: Attention,
    projected: torch.Tensor,
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    dtype: torch.dtype,
    threads: int = 0,
    isa: str = "",
) -> torch.Tensor:
    """Norm, rotate, store keys and values, attend and gate T packed query tokens of B sequences.

    Args:
        projected: [T, (N + 2K) * D (+ N * D with a gate)] float32: query heads, key heads, value heads, gates.
            Overwritten.
        query_lengths, context_lengths, page_table [B, P] int64, slot_mapping [T] int64: as in core.Batch.
        tables: cosine and sine, [T, R / 2] float32 each; the first R dimensions of a head are turned.
        keys, values: [pages, page_size, K, D] float32 or bfloat16; written at slot_mapping, then read.
        dtype: of the result, float32 or bfloat16.

    Returns: [T, padded(N * D)].
    """
    dim = keys.shape[-1]
    out = torch.empty(projected.shape[0], padded(layer.heads * dim), dtype=dtype)
    _native.attention(
        projected, list(query_lengths), list(context_lengths), page_table, slot_mapping, keys, values, layer.norm,
        layer.epsilon, *tables, layer.heads, layer.window, layer.gated, layer.scale or dim**-0.5, out,
        threads or torch.get_num_threads(), isa,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class DeltaNet:
    """One layer's tensors, float32. W taps of C channels (queries, keys, values), Nv value heads of Dk x Dv.

    taps: [W, C], oldest first; decay_scale: [Nv], -exp(A_log); decay_bias: [Nv]; norm: [Dv].
    """

    taps: torch.Tensor
    decay_scale: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    epsilon: float


def delta_net(
    layer: DeltaNet,
    projected: torch.Tensor,
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    state_slots: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    dtype: torch.dtype,
    threads: int = 0,
    isa: str = "",
    captures: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Convolution, gated delta rule and gated norm of T packed tokens of B sequences.

    Args:
        projected: [T, C + Nv * Dv + 2 Nv] float32: channels, output gate, rate and decay inputs.
        query_lengths, context_lengths, state_slots [B] int64: as in core.Batch; a context of 0 starts from zeros.
        window: [slots, W - 1, C], state: [slots, Nv, Dk, Dv], float32; read and written at the slots.
        dtype: of the result, float32 or bfloat16.
        captures: (row, tokens, slot), as core.Capture in core.Batch. Their slots, results and what follows are, bit for
            bit, those of calls that end there.

    Returns: [T, padded(Nv * Dv)].
    """
    out = torch.empty(projected.shape[0], padded(state.shape[1] * state.shape[3]), dtype=dtype)
    _native.delta_net(
        projected, list(query_lengths), list(context_lengths), state_slots, layer.taps, layer.decay_scale,
        layer.decay_bias, layer.norm, layer.epsilon, window, state,
        numpy.array(captures, dtype=numpy.int64).reshape(-1, 3), out, threads or torch.get_num_threads(), isa,
    )  # fmt: skip
    return out


def route(
    logits: torch.Tensor, top_k: int, normalize: bool, threads: int = 0, isa: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k most probable of softmax(logits), the most probable first, of equal ones the lower id.

    logits [T, E] float32 -> ids [T, top_k] int32 and weights [T, top_k] float32, scaled to sum to one if `normalize`.
    Logits with a NaN give NaN weights and valid ids.
    """
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32)
    weights = torch.empty(logits.shape[0], top_k)
    _native.route(logits, normalize, ids, weights, threads or torch.get_num_threads(), isa)
    return ids, weights
