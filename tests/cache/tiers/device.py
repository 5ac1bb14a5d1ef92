"""A device without a model: the cache's tensors, and paths whose keys, values and states follow from their tokens.

So a test can tell for every token and state on the device whether it is the one that the path must have there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ftengine.cache.sessions import Sessions
from ftengine.cache.tensors import allocate_cache
from ftengine.cache.tiers.base import Found, Kept, Ticket
from ftengine.cache.tiers.identity import Identity
from ftengine.cache.tiers.open import HostAndDisk, open_tiers
from ftengine.cache.tiers.writer import Pace
from ftengine.core import BoundaryKind, CacheLayout, StateSpec
from ftengine.experts.pinned import pin

PAGE, SLOTS = 16, 8
STATES = ((StateSpec("s", (2, 3), "float32"), StateSpec("conv", (5,), "bfloat16")),) * 2
HYBRID = CacheLayout(2, 1, 4, "bfloat16", STATES)
ATTENTION = CacheLayout(2, 1, 4, "float32")
IDENTITY = Identity("model", "w", "float32", "cpu", "l", PAGE, "t", "k", "1")
AT_ONCE = Pace(settle=0.0, lag=0.0, retry=0.05, between=0.0)


def packed(tokens: list[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


class Device:
    """Pages 0..pages-1, then the companion page of each slot."""

    def __init__(self, layout: CacheLayout, pages: int, page_size: int, where: str) -> None:
        self.layout = layout
        self.pages = pages
        self.page_size = page_size
        self.tensors = allocate_cache(layout, pages, page_size, SLOTS, where)

    def clear(self) -> None:
        for tensor in (*self.tensors.keys, *self.tensors.values, *self._states()):
            tensor.zero_()

    def fill(self, tokens: list[int], pages: list[int], companion: int, slot: int) -> None:
        """As a model would that computed the path."""
        full = len(tokens) // self.page_size * self.page_size
        for number, layer in enumerate((*self.tensors.keys, *self.tensors.values)):
            content = rows(tokens, number, self.layout)
            for begin in range(0, len(tokens), self.page_size):
                page = pages[begin // self.page_size] if begin < full else companion
                part = content[begin : begin + self.page_size]
                layer[page, : len(part)] = part.to(layer)
        for number, state in enumerate(self._states()):
            state[slot] = state_of(tokens, number, tuple(state.shape[1:])).to(state)

    def wrong(self, tokens: list[int], pages: list[int], slot: int, start: int = 0) -> str:
        """What is not as it must be, of the path from `start` on; "" if all is."""
        for number, layer in enumerate((*self.tensors.keys, *self.tensors.values)):
            content = rows(tokens, number, self.layout).to(layer.dtype)
            found = layer[pages].flatten(0, 1)[: len(tokens)].cpu()
            different = (found[start:] != content[start:]).flatten(1).any(dim=1).nonzero()
            if len(different):
                return f"tensor {number}: token {start + int(different[0])} of {len(tokens)}"
        for number, state in enumerate(self._states()):
            if not torch.equal(state[slot].cpu(), state_of(tokens, number, tuple(state.shape[1:])).to(state.dtype)):
                return f"state {number}"
        return ""

    def _states(self) -> list[torch.Tensor]:
        return [state for layer in self.tensors.states for state in layer.values()]


def rows(tokens: list[int], number: int, layout: CacheLayout) -> torch.Tensor:
    """[tokens, heads, dim]: depends on the token, its position, and all tokens before it."""
    history = np.cumsum(np.asarray(tokens, np.int64) * 31 + 7) % 251
    place = torch.arange(layout.kv_heads * layout.head_dim).view(layout.kv_heads, layout.head_dim)
    base = torch.from_numpy(history).view(-1, 1, 1) + number * 3
    return ((base + place) % 256).float()


def state_of(tokens: list[int], number: int, shape: tuple[int, ...]) -> torch.Tensor:
    own = np.asarray(tokens, np.int64)
    total = int((own * np.arange(1, len(own) + 1)).sum()) % 253
    size = int(np.prod(shape))
    return ((torch.arange(size) + total + number) % 256).float().view(shape)


@dataclasses.dataclass
class Bench:
    """A device with tiers, one path at a time."""

    device: Device
    tiers: HostAndDisk
    sessions: Sessions

    def keep(
        self,
        tokens: list[int],
        kind: BoundaryKind = BoundaryKind.PROMPT_END,
        session: str = "s",
        side: bool = False,
        wait: bool = True,
    ) -> Ticket | None:
        device = self.device
        full = len(tokens) // device.page_size
        companion = device.pages if len(tokens) % device.page_size else -1
        device.fill(tokens, list(range(full)), device.pages, 0)
        slot = 0 if device.layout.states else -1
        self.sessions.begin(packed(tokens), session, side, time.monotonic())
        ticket = self.tiers.keep(Kept(packed(tokens), list(range(full)), companion, slot, kind, session, side))
        if wait and ticket is not None:
            until(lambda: ticket.done)
        return ticket

    def find(self, tokens: list[int], limit: int | None = None, above: int = 0) -> Found | None:
        return self.tiers.find(packed(tokens), len(tokens) if limit is None else limit, above)

    def restore(self, tokens: list[int], found: Found, start: int = 0) -> Ticket:
        """Onto a device that has nothing of it but the first `start` tokens."""
        device = self.device
        device.clear()
        pages = self.target(found.tokens)
        if start:
            for number, layer in enumerate((*device.tensors.keys, *device.tensors.values)):
                own = rows(tokens[:start], number, device.layout).to(layer)
                layer[pages[: start // device.page_size]] = own.view(-1, device.page_size, *own.shape[1:])
        ticket = self.tiers.restore(found, packed(tokens), start, pages, 1)
        until(lambda: ticket.done)
        return ticket

    def target(self, tokens: int) -> list[int]:
        """Pages that are no neighbours."""
        count = -(-tokens // self.device.page_size)
        return [(7 * page + 3) % self.device.pages for page in range(count)]

    def check_restored(self, tokens: list[int], ticket: Ticket, start: int = 0) -> None:
        own = tokens[: ticket.tokens]
        assert self.device.wrong(own, self.target(len(own)), 1, start) == ""

    def written(self) -> None:
        """Waits until nothing waits for the disk."""
        until(lambda: not self.tiers._books.unwritten)

    def close(self, seconds: float = 60.0) -> None:
        self.tiers.check_integrity()
        self.tiers.close(seconds)


def open_bench(
    layout: CacheLayout = HYBRID,
    host: int = 64 << 20,
    disk: int = 0,
    folder: Path | None = None,
    identity: Identity = IDENTITY,
    pace: Pace = AT_ONCE,
    page_size: int = PAGE,
    pages: int = 512,
    where: str = "cpu",
) -> Bench:
    device = Device(layout, pages, page_size, where)
    sessions = Sessions()
    tiers = open_tiers(
        tensors=device.tensors,
        layout=layout,
        sessions=sessions,
        host_bytes=host,
        disk_bytes=disk,
        folder=folder,
        identity=identity,
        pace=pace,
        pin=pin if where == "cuda" else None,
    )
    assert tiers is not None
    return Bench(device, tiers, sessions)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come to pass"
        time.sleep(0.001)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, length)]
