"""Runs probes in processes of their own, each with a time limit; what takes too long or breaks is a finding, too."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ftlaunch.machine import process
from ftlaunch.machine.probe import GROUPS, PROBES, Asked, Probe, Silence
from ftlaunch.machine.verdict import Finding, from_json

SECONDS = 14.0  # that all of it takes at the most; a measurement that would begin later is left out
QUICK_SECONDS = 1.5  # the same with --quick, without a model: the interpreter's start comes on top
LEAST_SECONDS = 0.4  # left for a measurement to begin
LONG = ("gpu", "cpu")  # facts that take as long as a driver's answer, and as a look at who computes

Say = Callable[[str], None]


def examine(asked: Asked, say: Say = lambda text: None, only: Sequence[str] | None = None) -> list[Finding]:
    """All findings, by group. Facts are found side by side, measurements taken one after the other: after all facts,
    or with --quick while what takes long is waited for.

    say: is told what is being measured. only: names of probes.
    """
    began = time.monotonic()
    end = began + SECONDS
    deadline = began + QUICK_SECONDS if asked.quick else end
    chosen = [p for p in PROBES if _limit(p, asked) is not None and (only is None or p.name in only)]
    facts, measures, last = ([p for p in chosen if p.stage == stage] for stage in ("facts", "measure", "last"))
    facts.sort(key=lambda probe: probe.name not in LONG)  # these begin first
    models = [probe for probe in chosen if probe.stage == "model" and asked.model]
    found: dict[str, list[Finding]] = {}

    def one_by_one(probes: Sequence[Probe], until: float) -> None:
        for probe in probes:
            told = replace(asked, known=known(found.values()))
            if probe.name == "gpu_link" and not told.known.get("gpu.use", {}).get("usable"):
                continue
            if probe.stage == "measure":
                say(f"Measuring: {probe.of}")
            found.update(run([probe], told, until - time.monotonic()))

    with _started(facts, asked, deadline - began) as running:
        found |= {one.probe.name: one.findings() for one in running if one.probe.name not in LONG}
        if asked.quick:
            one_by_one(measures, deadline)
        found |= {one.probe.name: one.findings() for one in running if one.probe.name in LONG}
    one_by_one([*([] if asked.quick else measures), *last], deadline)
    one_by_one(models, end)
    everything = [finding for probe in PROBES for finding in found.get(probe.name, [])]
    return sorted(everything, key=lambda finding: list(GROUPS).index(finding.group))


def known(found: Iterable[Sequence[Finding]]) -> dict[str, dict[str, Any]]:
    """Data by id; of several with one id the first."""
    data: dict[str, dict[str, Any]] = {}
    for findings in found:
        for finding in findings:
            data.setdefault(finding.id, finding.data)
    return data


def run(probes: Sequence[Probe], asked: Asked, left: float = SECONDS) -> dict[str, list[Finding]]:
    """What probes find, side by side, by their names; also what one had told before it was ended. left: seconds."""
    with _started(probes, asked, left) as running:
        return {one.probe.name: one.findings() for one in running}


@contextmanager
def _started(probes: Sequence[Probe], asked: Asked, left: float) -> Iterator[list[_Running]]:
    """Each in its process, whose time begins now; none is left behind."""
    began = time.monotonic()
    running: list[_Running] = []
    try:
        running.extend(_Running(probe, asked, min(_limit(probe, asked) or 0.0, left), began) for probe in probes)
        yield running
    finally:
        for one in running:
            one.leave()


class _Running:
    """A probe in its process, and a thread that takes its findings as they come. limit: seconds since `began`."""

    def __init__(self, probe: Probe, asked: Asked, limit: float, began: float) -> None:
        self.probe, self.quick, self.limit = probe, asked.quick, limit
        self.refused = "" if limit >= LEAST_SECONDS else "no time was left for it"
        self.broken = False  # nothing will be known of this machine, however long it takes
        self.found: list[Finding] = []
        self.waits = ""  # on whom
        self.status: int | None = None
        self.deadline = began + limit
        self.child: subprocess.Popen[bytes] | None = None
        self.reader = threading.Thread(target=self._read, name="findings", daemon=True)
        if self.refused:
            return
        try:
            self.child = process.start("ftlaunch.machine.child", probe.name, asked.to_json())
        except OSError as error:
            self.refused, self.broken = f"no process can be started: {error.strerror}", True
            return
        self.reader.start()

    def findings(self) -> list[Finding]:
        if self.refused:
            return [self.probe.unknown(self.refused, "warn" if self.broken else "note")]
        self.reader.join(max(0.0, self.deadline - time.monotonic()))
        if self.reader.is_alive():
            self.leave()
            told = frozenset(each.id for each in self.found)
            return [*self.found, *Silence(self.probe, self.limit, self.quick, told, self.waits).findings()]
        if self.status:
            return [*self.found, self.probe.unknown(f"what asked ended with status {self.status}", "warn")]
        return list(self.found)

    def leave(self) -> None:
        if self.child is not None and self.reader.is_alive():
            process.end(self.child)

    def _read(self) -> None:
        assert self.child is not None
        assert self.child.stdout is not None
        with self.child.stdout as lines:
            for line in lines:
                try:
                    content = json.loads(line)
                    if content.keys() == {"waits"}:
                        self.waits = str(content["waits"])
                    else:
                        self.found.append(from_json(content))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    pass  # a line cut short
        self.status = self.child.wait()


def _limit(probe: Probe, asked: Asked) -> float | None:
    return probe.quick_seconds if asked.quick else probe.seconds
