"""What mixers compute, in float64 and sequence by sequence, from the formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def half_unit(device) -> float:
    """The relative error that rounding to bfloat16 may make; Triton's interpreter cuts off instead."""
    return 2**-8 if device == "cuda" else 2**-7


@dataclass
class Paged:
    """Sequences' keys and values in a shuffled paged cache. What no sequence has is NaN: nothing may read it."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor  # int32 [B, P]
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # float64 [L, K, D] of each sequence, on the CPU


def paged(lengths, kv_heads, dim, dtype, device, page=16, spare_pages=1) -> Paged:
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + 1
    order = torch.randperm(total - 1) + 1
    keys, values = (torch.full((total, page, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2))
    table = torch.zeros(len(lengths), max(counts) + spare_pages, dtype=torch.int32)
    dense, used = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[used : used + count]
        used += count
        table[row, :count] = mine.int()
        pair = []
        for cache in (keys, values):
            drawn = torch.randn(length, kv_heads, dim).to(dtype)
            flat = cache[mine].flatten(0, 1)
            flat[:length] = drawn
            cache[mine] = flat.view(count, page, kv_heads, dim)
            pair.append(drawn.double())
        dense.append(tuple(pair))
    return Paged(keys.to(device), values.to(device), table.to(device), dense)


def attend(queries, keys, values, first_position, scale, window=0, gate=None):
    """Causal attention of rows at first_position, first_position + 1, ...: queries [T, N, D], keys [L, K, D]
    -> [T, N * D]."""
    tokens, heads, _ = queries.shape
    repeats = heads // keys.shape[1]
    keys, values = (part.double().repeat_interleave(repeats, 1) for part in (keys, values))
    scores = torch.einsum("tnd,lnd->ntl", queries.double(), keys) * scale
    position = torch.arange(tokens)[:, None] + first_position
    key = torch.arange(keys.shape[0])[None]
    hidden = key > position
    if window:
        hidden |= key <= position - window
    out = torch.einsum("ntl,lnd->tnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values).flatten(1)
    return out if gate is None else out * gate.double().sigmoid()


def delta_net(layer, projected, window, state, key_heads, value_heads, key_dim, value_dim):
    """Token by token: projected [T, C + Nv Dv + 2 Nv], window [W - 1, C], state [Nv, Dk, Dv]; all float64.

    Returns the rows [T, Nv * Dv], the window and the state after them.
    """
    keys_size, values_size, repeats = key_heads * key_dim, value_heads * value_dim, value_heads // key_heads
    sizes = [2 * keys_size + values_size, values_size, value_heads, value_heads]
    taps, scale, bias, norm = (
        part.double().cpu() for part in (layer.taps, layer.decay_scale, layer.decay_bias, layer.norm)
    )
    rows = []
    for row in projected:
        mixed, gate, rate, decay = row.split(sizes)
        padded = torch.cat((window, mixed[None]))
        window = padded[1:]
        convolved = (padded * taps).sum(0)
        convolved = convolved * convolved.sigmoid()
        query, key, value = convolved.split([keys_size, keys_size, values_size])
        query, key = (
            (part / (part.view(key_heads, key_dim).square().sum(-1, keepdim=True) + 1e-6).sqrt())
            for part in (query.view(key_heads, key_dim), key.view(key_heads, key_dim))
        )
        query, key = (part.repeat_interleave(repeats, 0) for part in (query, key))
        value = value.view(value_heads, value_dim)
        state = state * (scale * torch.nn.functional.softplus(decay + bias)).exp()[:, None, None]
        correction = rate.sigmoid()[:, None] * (value - torch.einsum("nk,nkv->nv", key, state))
        state = state + key[:, :, None] * correction[:, None]
        core = torch.einsum("nk,nkv->nv", query * key_dim**-0.5, state)
        core = core / (core.square().mean(-1, keepdim=True) + layer.epsilon).sqrt() * norm
        gate = gate.view(value_heads, value_dim)
        rows.append((core * gate * gate.sigmoid()).flatten())
    return torch.stack(rows), window, state
