"""Grouped-query attention over paged keys and values, for prefill chunks and decode tokens packed together.

Scores exist for QUERY_BLOCK query rows of one sequence at a time; keys are read in place where a sequence's pages
are one run, and gathered where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ftengine.layers.linear import Linear
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.rotary import rotate
from ftengine.layers.step import QUERY_BLOCK, DecodeGroup, Span, Step


@dataclass(frozen=True)
class Attention:
    """One layer. N query heads in K groups, one key/value head a group, D dimensions a head.

    qkv: [(N + 2K) * D (+ N * D with a gate), H]: all query heads, key heads, value heads, then the gate's heads.
    norm: per head, over queries and keys, weight [N + K, D]; or None.
    out: [H, N * D].
    """

    qkv: Linear
    out: Linear
    norm: RmsNorm | None
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False

    def __call__(
        self,
        hidden: torch.Tensor,
        step: Step,
        tables: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """hidden [T, H] -> float32 [T, H].

        keys, values: this layer's cache, [pages, page_size, K, D]; written, then read.
        """
        tokens = hidden.shape[0]
        projected = self.qkv(hidden).view(tokens, -1, self.head_dim)
        turning, kept = projected.tensor_split([self.heads + self.kv_heads], dim=1)
        if self.norm is not None:
            turning = self.norm(turning)
        turned = rotate(turning, *tables).to(keys.dtype)
        slots = step.batch.slot_mapping
        keys.flatten(0, 1).index_copy_(0, slots, turned[:, self.heads :])
        values.flatten(0, 1).index_copy_(0, slots, kept[:, : self.kv_heads].to(values.dtype))
        attended = self._attend(turned[:, : self.heads], step, keys, values).flatten(1)
        if self.gated:
            attended = kept[:, self.kv_heads :].flatten(1).sigmoid().mul_(attended)
        return self.out(attended.to(hidden.dtype))

    def _attend(self, queries: torch.Tensor, step: Step, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """queries [T, N, D] -> [T, N, D]."""
        grouped = queries.reshape(len(queries), self.kv_heads, -1, self.head_dim)  # [T, K, N/K, D]
        out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        for span, key_range in step.attention_spans:
            found = _heads_first(key_range.of(keys)), _heads_first(key_range.of(values))
            if span.length == 1:
                out[span.row] = _decode(grouped[span.row], *found)
            else:
                _prefill(grouped[span.rows], *found, span, step, out[span.rows])
        if step.decode_group is not None:
            _decode_group(grouped, step.decode_group, keys, values, out)
        return out.flatten(1, 2)


def _heads_first(cached: torch.Tensor) -> torch.Tensor:
    """[L, K, D] -> [K, 1, L, D]; key/value heads take the batch's place, query heads of a group the heads'."""
    return cached.transpose(0, 1).unsqueeze(1)


def _decode(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """queries [K, N/K, D], keys and values [K, 1, L, D] -> [K, N/K, D]. A group's queries are rows over its keys."""
    return F.scaled_dot_product_attention(queries.unsqueeze(1), keys, values).squeeze(1)


def _prefill(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, step: Step, out: torch.Tensor
) -> None:
    """queries and out [T, K, N/K, D] of one sequence; each block of rows reads only the keys up to its own end."""
    groups = queries.shape[2]
    base = step.first_key(span.context)  # position of the first key that was handed in
    for start in range(0, span.length, QUERY_BLOCK):
        rows = min(QUERY_BLOCK, span.length - start)
        position = span.context + start
        first = step.first_key(position)
        seen = slice(first - base, position + rows - base)
        block = F.scaled_dot_product_attention(
            queries[start : start + rows].permute(1, 2, 0, 3),
            keys[:, :, seen].expand(-1, groups, -1, -1),
            values[:, :, seen].expand(-1, groups, -1, -1),
            attn_mask=step.causal_mask(rows, position - first),
        )
        out[start : start + rows] = block.permute(2, 0, 1, 3)


def _decode_group(
    grouped: torch.Tensor, group: DecodeGroup, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> None:
    mask = group.mask.expand(-1, -1, grouped.shape[2], -1)
    out[group.rows] = F.scaled_dot_product_attention(
        grouped[group.rows], group.of(keys), group.of(values), attn_mask=mask
    )
