"""A program that converts over and over in child processes and kills each at a random moment; prints what it found.

python -m tests.ftw.crash SOURCE OUT ROUNDS SEED: OUT is an FTW directory of SOURCE already, with kept formats; rounds
alternate between writing it in NVFP4 and back. Children are forked, because importing torch takes longer than a
conversion. On a busy machine there are more rounds, until some kills have hit one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw.header import read_header
from ftengine.weights.ftw.layout import Header, Origin
from ftengine.weights.ftw.verify import verify

KINDS = (Options(), Options(experts="mxfp4"))
LEAST = 2  # kills that hit a conversion, and one more
MOST = 5  # times the rounds


def child(source: Path, out: Path, options: Options) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            convert(source, out, options, Origin("x"))
        finally:
            os._exit(0)
    return pid


def main(source: Path, out: Path, rounds: int, seed: int) -> int:
    torch.set_num_threads(1)
    chance, killed, renewed = random.Random(seed), 0, 0
    whole: list[Header] = []
    times: list[float] = []
    for options in reversed(KINDS):
        began = time.monotonic()
        os.waitpid(child(source, out, options), 0)
        times.append(time.monotonic() - began)
        whole.insert(0, read_header(out))
    took = min(times)
    assert whole[0] != whole[1]
    for number in range(MOST * rounds):
        if number >= rounds and killed > LEAST:
            break
        before = read_header(out)
        pid = child(source, out, KINDS[whole.index(before) ^ 1])
        time.sleep(chance.uniform(0, 1.1 * took))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status)
        after = read_header(out)
        assert after in whole, f"round {number}: neither the old nor the new one"
        assert verify(out, threads=1) == [], f"round {number}: mixed"
        renewed += after != before
    os.waitpid(child(source, out, KINDS[0]), 0)
    assert read_header(out) == whole[0]
    assert verify(out) == []
    left = sorted(path.name for path in out.parent.iterdir() if path.name.startswith("."))
    assert left == [], left
    print(killed, renewed)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
