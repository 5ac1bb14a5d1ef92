"""`python -m ftengine.bench.prompt_tiers`: what keeping, finding and restoring prompts costs, on a GPU or on the CPU.

Qwen3.6-35B-A3B's shapes: keys and values of 20 KiB a token, states of 61 MiB. Each figure stands beside what a plain
copy of the same bytes takes. Prints also how long a loop that stands for the step loop was held up meanwhile.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftengine.cache.sessions import Sessions
from ftengine.cache.tensors import allocate_cache, kv_bytes_per_token, state_bytes
from ftengine.cache.tiers.base import Found, Kept, Ticket
from ftengine.cache.tiers.host_and_disk import HostAndDisk
from ftengine.cache.tiers.identity import Identity
from ftengine.cache.tiers.open import open_tiers
from ftengine.core import BoundaryKind, CacheLayout, CacheTensors, StateSpec
from ftengine.experts.pinned import pin

PAGE = 16
STATES = ((StateSpec("state", (32, 128, 128), "float32"), StateSpec("conv", (8192, 3), "bfloat16")),) * 30
LAYOUT = CacheLayout(10, 2, 256, "bfloat16", STATES)
TAIL = 250  # tokens behind the last chunk
SLOTS = 4
LENGTH = 60 * 1000 // 512 * 512 + TAIL
IDENTITY = Identity("bench", "", "bfloat16", "", "", PAGE, "", "", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=LENGTH)
    parser.add_argument("--folder", type=Path, help="where the disk tier is measured; without it in a temporary folder")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # as the engines have it: a plain copy is one thread's
    tokens = options.tokens
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        Bench(options.device, tokens, Path(folder)).run()
    return 0


class Bench:
    def __init__(self, device: str, tokens: int, folder: Path) -> None:
        self.tokens = tokens
        self.device = device
        self.folder = folder
        pages = -(-tokens // PAGE)
        self.tensors = allocate_cache(LAYOUT, 2 * pages, PAGE, SLOTS, device)
        for tensor in all_tensors(self.tensors):
            tensor.copy_(torch.randint(0, 100, tensor.shape[1:], device=tensor.device).to(tensor.dtype))
        self.pages = list(range(pages))
        self.companion = 2 * pages
        chance = np.random.default_rng(0)
        self.scattered = [int(page) for page in pages + chance.permutation(pages)]
        self.path = chance.integers(0, 100_000, tokens, dtype="<i4").tobytes()
        self.sessions = Sessions()
        self.size = tokens * kv_bytes_per_token(LAYOUT) + state_bytes(LAYOUT)
        self.host_bytes = self.size + (256 << 20)

    def run(self) -> None:
        print(f"{self.device}, {self.tokens} tokens, {self.size / 1e9:.2f} GB with the state")
        tiers = self.open(self.host_bytes, 4 * self.size)
        self.keep(tiers)
        self.find(tiers)
        while tiers.sizes()[1].details["unwritten"]:
            time.sleep(0.05)
        self.restore(tiers)
        self.whole(tiers, "host")
        began = time.perf_counter()
        tiers.close(60.0)
        print(f"written to disk and closed in {time.perf_counter() - began:.2f} s more")
        began = time.perf_counter()
        tiers = self.open(self.host_bytes, 4 * self.size)
        print(f"opened in {1e3 * (time.perf_counter() - began):.0f} ms")
        self.whole(tiers, "disk")
        tiers.close(1.0)

    def open(self, host: int, disk: int) -> HostAndDisk:
        tiers = open_tiers(
            tensors=self.tensors,
            layout=LAYOUT,
            sessions=self.sessions,
            host_bytes=host,
            disk_bytes=disk,
            folder=self.folder,
            identity=IDENTITY,
            wake=DONE.set,
            pin=pin if self.device == "cuda" else None,
        )
        assert tiers is not None
        return tiers

    def keep(self, tiers: HostAndDisk) -> None:
        began = time.perf_counter()
        held_up, quiet = LoopDelays(), LoopDelays()
        with quiet:
            time.sleep(0.5)
        with held_up:
            asked = time.perf_counter()
            ticket = tiers.keep(self.kept(self.path, BoundaryKind.PROMPT_END))
            asked = time.perf_counter() - asked
            assert ticket is not None
            wait(ticket)
        took = time.perf_counter() - began - 0.5
        print(f"keep: returns in {1e6 * asked:.0f} us; copied in {took:.2f} s, {self.size / took / 1e9:.1f} GB/s")
        print(f"a loop beside it was held up {held_up.worst():.2f} ms at the most, {quiet.worst():.2f} ms without it")
        times = []
        for _ in range(100):
            began = time.perf_counter()
            ticket = tiers.keep(self.kept(self.path, BoundaryKind.PROMPT_END))
            times.append(time.perf_counter() - began)
            assert ticket is not None
            wait(ticket)
        print(f"keep of what is below: returns in {1e6 * statistics.median(times):.0f} us")

    def find(self, tiers: HostAndDisk) -> None:
        asked = self.path + bytes(4 * 100)
        times = []
        for _ in range(100):
            began = time.perf_counter()
            found = tiers.find(asked, self.tokens + 100, 0)
            times.append(time.perf_counter() - began)
            assert found is not None
            assert found.tokens == self.tokens
        print(f"find: {1e3 * statistics.median(times):.2f} ms, {1e3 * max(times):.2f} ms at the most")

    def restore(self, tiers: HostAndDisk) -> None:
        """The state and the tail: the chunks are in place."""
        start = self.tokens // 512 * 512
        size = state_bytes(LAYOUT) + (self.tokens - start) * kv_bytes_per_token(LAYOUT)
        found = tiers.find(self.path, self.tokens, start)
        assert found is not None
        copies, times = [], []
        plain = self.plain(size)
        for _ in range(20):
            copies.append(plain())
            began = time.perf_counter()
            wait(tiers.restore(found, self.path, start, self.scattered, 1))
            times.append(time.perf_counter() - began)
        copy, took = statistics.median(copies), statistics.median(times)
        print(
            f"restore of {size / 1e6:.0f} MB: {1e3 * took:.2f} ms, {1e3 * min(times):.2f} at best; "
            f"a plain copy: {1e3 * copy:.2f} ms, {1e3 * min(copies):.2f} at best"
        )

    def whole(self, tiers: HostAndDisk, name: str) -> None:
        found: Found | None = tiers.find(self.path, self.tokens, 0)
        assert found is not None
        began = time.perf_counter()
        held_up = LoopDelays()
        with held_up:
            ticket = tiers.restore(found, self.path, 0, self.scattered, 2)
            wait(ticket)
        took = time.perf_counter() - began
        assert ticket.tokens == self.tokens, ticket.reason
        print(
            f"restore of all from {name} ({found.tier}): {took:.2f} s, {self.size / took / 1e9:.1f} GB/s; "
            f"a loop beside it was held up {held_up.worst():.2f} ms"
        )
        self.compare()

    def compare(self) -> None:
        """What was restored against what was kept."""
        for tensor in (*self.tensors.keys, *self.tensors.values):
            flat = tensor.flatten(0, 1)
            for first in range(0, self.tokens - TAIL, 4096):
                own = tensor[self.pages[first // PAGE : first // PAGE + 256]].flatten(0, 1)
                other = tensor[self.scattered[first // PAGE : first // PAGE + 256]].flatten(0, 1)
                count = min(4096, self.tokens - TAIL - first, len(own))
                assert torch.equal(own[:count], other[:count]), "keys or values differ"
            del flat
        for layer in self.tensors.states:
            for state in layer.values():
                assert torch.equal(state[0], state[2]), "a state differs"

    def plain(self, size: int) -> Callable[[], float]:
        """Seconds for one copy of so many bytes from (pinned) host memory to where the model computes."""
        source = torch.ones(size, dtype=torch.uint8)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.device == "cuda":
            source = source.pin_memory()

        def copy() -> float:
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if self.device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        copy()
        return copy

    def kept(self, path: bytes, kind: BoundaryKind) -> Kept:
        full = len(path) // 4 // PAGE
        return Kept(path, self.pages[:full], self.companion, 0, kind, "bench", False)


class LoopDelays:
    """A thread that wants the interpreter every millisecond, as the step loop does; and how late it got it."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def __enter__(self) -> LoopDelays:
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended = True
        self._thread.join()

    def worst(self) -> float:
        """Milliseconds."""
        return 1e3 * max(self.delays, default=0.0)

    def _run(self) -> None:
        while not self._ended:
            due = time.perf_counter() + 1e-3
            time.sleep(1e-3)
            self.delays.append(time.perf_counter() - due)


def all_tensors(tensors: CacheTensors) -> list[torch.Tensor]:
    states = [state for layer in tensors.states for state in layer.values()]
    return [*tensors.keys, *tensors.values, *states]


DONE = threading.Event()  # set by the tiers' thread


def wait(ticket: Ticket) -> None:
    while not ticket.done:
        DONE.wait()
        DONE.clear()


if __name__ == "__main__":
    sys.exit(main())
