"""Throws damaged input at a parser and keeps what taught it something new.

An execution is good when the parser takes the input or refuses it with CheckpointError. Anything else it raises, more
than a second of processor time, or 64 MB more memory is a finding. Novelty is told by the refusal's sentence without
its numbers and names: an input that is refused in a new way joins the corpus and is mutated further.

Run as a program it fuzzes one parser and can keep the corpus: `python -m tests.fuzz.driver gguf --executions 1000000
--keep`.
"""

from __future__ import annotations

import argparse
import base64
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ftengine.errors import CheckpointError
from tests.fuzz.mutate import mutate

CORPUS = Path(__file__).parent / "corpus"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each input is written to a file
MAX_INPUT = 1 << 14
MAX_CORPUS = 256
MAX_KEPT = 64
SECONDS = 1.0
MEGABYTES = 64
WARM_UP = 200  # executions before memory is looked at: modules, caches and arenas fill

Execute = Callable[[bytes], None]
VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\S*[/\\.]\S*|[-+\d]+|[^\x20-\x7e]+")


@dataclass
class Outcome:
    executions: int = 0
    taken: int = 0  # inputs that the parser found sound
    slowest: float = 0.0  # seconds of processor time
    growth: float = 0.0  # megabytes of resident memory, from the warm-up to the end
    peak: float = 0.0  # megabytes above the highest before
    findings: list[str] = field(default_factory=list)
    corpus: list[bytes] = field(default_factory=list)


def fuzz(execute: Execute, seeds: Sequence[bytes], executions: int, seed: int = 0) -> Outcome:
    """Deterministic but for the clock: the same seed gives the same inputs."""
    chance, outcome = random.Random(seed), Outcome(corpus=list(seeds))
    known: set[str] = set()
    for content in seeds:
        known.add(_run(execute, content, outcome))
    process = psutil.Process()
    resident = peak = 0
    for number in range(executions):
        if number == min(WARM_UP, executions - 1):
            resident, peak = process.memory_info().rss, _peak()
        content = mutate(chance, outcome.corpus)[:MAX_INPUT]
        answer = _run(execute, content, outcome)
        if answer not in known:
            known.add(answer)
            if len(outcome.corpus) < MAX_CORPUS:
                outcome.corpus.append(content)
    outcome.growth = (process.memory_info().rss - resident) / 1e6
    outcome.peak = (_peak() - peak) / 1e6
    return outcome


def _run(execute: Execute, content: bytes, outcome: Outcome) -> str:
    """What came of it, without what varies."""
    outcome.executions += 1
    began = time.process_time()
    try:
        execute(content)
        outcome.taken += 1
        answer = "taken"
    except CheckpointError as error:
        answer = VARIABLE.sub("#", str(error))[:200]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        answer = f"{type(error).__name__}: {VARIABLE.sub('#', str(error))[:100]}"
        if not any(finding.startswith(answer) for finding in outcome.findings):
            outcome.findings.append(f"{answer} of {_shown(content)}")
    took = time.process_time() - began
    outcome.slowest = max(outcome.slowest, took)
    if took > SECONDS:
        outcome.findings.append(f"{took:.1f} s of {_shown(content)}")
    return answer


def _shown(content: bytes) -> str:
    return base64.b64encode(content).decode()[:2000]


def _peak() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def read_corpus(name: str) -> list[bytes]:
    """One input a line, in base64. See keep_corpus."""
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text("ascii").split()] if path.exists() else []


def keep_corpus(name: str, corpus: Sequence[bytes]) -> None:
    """Those that are quickest to read and to mutate."""
    CORPUS.mkdir(exist_ok=True)
    shortest = sorted(dict.fromkeys(corpus), key=len)[:MAX_KEPT]
    lines = [base64.b64encode(content).decode() for content in shortest]
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), "ascii")


def main() -> int:
    import tempfile

    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description="Fuzz one parser.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFFFFFF)
    parser.add_argument("--keep", action="store_true", help="add what was new to tests/fuzz/corpus")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        execute, seeds = TARGETS[options.target](Path(folder))
        outcome = fuzz(execute, [*seeds, *read_corpus(options.target)], options.executions, options.seed)
    print(
        f"{options.target}: seed {options.seed}, {outcome.executions} executions, {outcome.taken} taken, slowest "
        f"{outcome.slowest * 1000:.0f} ms, memory {outcome.growth:+.1f} MB, {len(outcome.corpus)} inputs in the corpus"
    )
    for finding in outcome.findings[:20]:
        print("FOUND", finding)
    if options.keep:
        keep_corpus(options.target, outcome.corpus[len(seeds) :])
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
