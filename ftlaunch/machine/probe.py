"""Which probes there are, what each is given, and how long it may take."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ftlaunch.machine.verdict import Finding

Stage = Literal["facts", "measure", "last", "model"]


@dataclass(frozen=True)
class Asked:
    """model: the path of one that is to fit; to_fetch: bytes, where it is not on this machine and that stands for it.
    bundled: it is a name of the catalogue instead, of which bundled facts tell. config: of the engine, as JSON, where
    flags of `ft serve` change it.

    known: data of the findings of earlier stages, by id; of several with one id the first.
    """

    quick: bool = False
    model: str | None = None
    to_fetch: int | None = None
    bundled: bool = False
    config: str | None = None
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Asked:
        return Asked(**json.loads(text))


@dataclass(frozen=True)
class Probe:
    """A module with `probe(asked) -> Iterator[Finding]`, run by ftlaunch.machine.child. seconds: its time limit.

    quick_seconds: the limit with --quick, None where it is then left out. of: what is to be said when it does not end.
    late: why that may be so where nothing is wrong, and what then helps.
    """

    name: str
    stage: Stage
    of: str
    seconds: float
    quick_seconds: float | None = None
    late: str = ""

    def run(self, asked: Asked) -> Iterator[Finding]:
        found: Iterator[Finding] = importlib.import_module(f"ftlaunch.machine.{self.name}").probe(asked)
        return found


COMPILES = "ft doctor once more: kernels are compiled the first time"
FACTS, QUICK = 6.0, 1.2  # seconds. A driver that has slept takes some for each GPU
PROBES = (
    Probe("cpu", "facts", "the CPU", FACTS, QUICK),
    Probe("memory", "facts", "memory", FACTS, QUICK),
    Probe("limits", "facts", "limits", FACTS, QUICK),
    Probe("disk", "facts", "the disk", FACTS, QUICK),
    Probe("gpu", "facts", "the GPU", FACTS, QUICK),
    Probe("software", "facts", "what is installed", FACTS, QUICK),
    Probe("agents", "facts", "the agents", FACTS, QUICK),
    Probe("server", "facts", "the port", FACTS, QUICK),
    Probe("store", "facts", "the store", FACTS, QUICK),
    Probe("memory_read", "measure", "reading memory", 5.0),
    Probe("disk_read", "measure", "reading the disk", 3.0, 0.6),
    Probe("gpu_link", "measure", "the link to the GPU", 9.0, late=COMPILES),
    Probe("catalogue", "last", "the catalogue", 3.0, 0.8),
    Probe("model", "model", "the model", 8.0, 8.0),
)
BY_NAME = {probe.name: probe for probe in PROBES}
GROUPS = {
    "cpu": "CPU",
    "memory": "Memory",
    "limits": "Limits",
    "disk": "Disk",
    "gpu": "GPU",
    "software": "Software",
    "agents": "Agents",
    "server": "Server",
    "store": "Store",
    "catalogue": "Models that run here",
    "model": "Model",
}
