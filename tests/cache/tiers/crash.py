"""A program that keeps prompts on disk in child processes and kills each at a random moment; prints what it found.

python -m tests.cache.tiers.crash FOLDER ROUNDS SEED. Children are forked, because importing torch takes longer than
writing does. On a busy machine there are more rounds, until a write was cut off and a record was found. After each kill
the folder is opened as at the next start: nothing is logged as a fault, whatever is found is restored and right,
nothing unfinished is left, and the budget holds.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ftengine.core import BoundaryKind, CacheLayout, StateSpec
from tests.cache.tiers.device import IDENTITY, Bench, open_bench, prompt

LAYOUT = CacheLayout(2, 1, 64, "float32", ((StateSpec("s", (64, 1024), "float32"),),))  # 256 KiB; a chunk: 512 KiB
BUDGET = 12 << 20  # less than is written: records are also removed
PATHS = 40
MOST = 10  # times the rounds


def opened(folder: Path) -> Bench:
    return open_bench(LAYOUT, 32 << 20, BUDGET, folder, pages=256)


def path(number: int) -> list[int]:
    """Some go on from others."""
    return [*prompt(900, number // 4), *prompt(100 + 150 * (number % 4), number)]


def child(folder: Path, seed: int) -> int:
    """Returns when it begins to keep."""
    begins, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            chance = random.Random(seed)
            bench = opened(folder)
            os.write(begun, b"!")
            while True:
                bench.keep(path(chance.randrange(PATHS)), BoundaryKind.SYSTEM, session=str(chance.randrange(5)))
        finally:
            os._exit(1)
    os.close(begun)
    os.read(begins, 1)
    os.close(begins)
    return pid


def check(folder: Path, first: int) -> int:
    """How many paths are found."""
    bench = opened(folder)
    names = [entry.name for entry in (folder / IDENTITY.key).iterdir()]
    assert not [name for name in names if name.startswith(".")], names
    size = sum(entry.stat().st_size for entry in (folder / IDENTITY.key).iterdir())
    assert size <= BUDGET, f"{size} bytes of {BUDGET}"
    found = 0
    for number in range(first % 5, PATHS, 5):
        tokens = path(number)
        place = bench.find(tokens)
        if place is not None:
            ticket = bench.restore(tokens, place)
            assert (ticket.tokens, ticket.reason) == (place.tokens, "")
            bench.check_restored(tokens, ticket)
            found += place.tokens == len(tokens)
    assert [size.failures for size in bench.tiers.sizes()] == [0, 0]
    bench.close(0.0)
    return found


class Faults(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def main(folder: Path, rounds: int, seed: int) -> int:
    torch.set_num_threads(1)
    faults = Faults()
    logging.getLogger().addHandler(faults)
    chance, unfinished, found = random.Random(seed), 0, 0
    for number in range(MOST * rounds):
        if number >= rounds and unfinished and found:
            break
        pid = child(folder, seed + number)
        time.sleep(chance.uniform(0.02, 0.15))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"round {number}: the child ended by itself"
        own = folder / IDENTITY.key
        unfinished += any(entry.name.startswith(".") for entry in (own.iterdir() if own.is_dir() else ()))
        found += check(folder, number)
        assert not faults.seen, faults.seen
    print(unfinished, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
