"""Which routes of a prefill chunk go to which expert: sorted and cut into tiles on the device, no count on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCKS = ((1024, 16), (8192, 32), (32768, 64))  # up to so many routes, so many a tile
LARGEST_BLOCK = 128
NOT_HERE = 2**31 - 1


@dataclass(frozen=True)
class RouteOrder:
    """Routes (token * k + i) by slot, R = T * k of them; those with slot -1 come last and are in no tile.

    A tile is up to `block` routes of one slot: places first[n] .. of `routes`, as far as `slots` stays the same.
    """

    tokens: int
    top_k: int
    block: int
    routes: torch.Tensor  # int32 [R]
    slots: torch.Tensor  # int32 [R], rising; NOT_HERE for routes that are not computed
    first: torch.Tensor  # int32 [R]
    count: torch.Tensor  # int32 [1], tiles
    skipped: torch.Tensor  # bool [T, k]


def block_of(routes: int) -> int:
    """Routes a tile, for so many in all."""
    return next((block for most, block in BLOCKS if routes <= most), LARGEST_BLOCK)


def order_routes(slots: torch.Tensor, block: int | None = None) -> RouteOrder:
    """slots: int32 [T, k], -1 where a route is not to be computed. block: routes a tile, 16 .. 128, a power of two."""
    tokens, top_k = slots.shape
    routes = slots.numel()
    block = block or block_of(routes)
    skipped = slots < 0
    ordered, order = torch.where(skipped, NOT_HERE, slots).flatten().sort(stable=True)
    place = torch.arange(routes, device=slots.device)
    starts = torch.ones(routes, dtype=torch.bool, device=slots.device)
    starts[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(starts, place, 0).cummax(0).values
    opens = ((place - start) % block == 0) & (ordered != NOT_HERE)
    number = opens.cumsum(0)
    # Places that open no tile are written behind the last one that there may be.
    first = torch.zeros(routes + 1, dtype=torch.int32, device=slots.device)
    first.scatter_(0, torch.where(opens, number - 1, routes), place.int())
    return RouteOrder(tokens, top_k, block, order.int(), ordered, first[:routes], number[-1:].int(), skipped)
