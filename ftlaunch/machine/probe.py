"""Which probes there are, what each is given, and how long it may take."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ftlaunch.machine.verdict import Finding, Verdict

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
class Waits:
    """Said before somebody is asked who may never answer, so that silence then is not taken for a busy machine's.

    on: whom. It crosses beside findings, as a line that is none.
    """

    on: str

    def as_json(self) -> dict[str, str]:
        return {"waits": self.on}


@dataclass(frozen=True)
class Probe:
    """A module with `probe(asked) -> Iterator[Finding | Waits]`, run by ftlaunch.machine.child. seconds: its limit.

    quick_seconds: the limit with --quick, None where it is then left out. of: what is to be said when it does not end.
    late: why that may be so where nothing is wrong, and what then helps. silence: a module with
    `silent(silence) -> list[Finding]`, which says more about that than `Silence.unknown` does.
    """

    name: str
    stage: Stage
    of: str
    seconds: float
    quick_seconds: float | None = None
    late: str = ""
    silence: str = ""

    def run(self, asked: Asked) -> Iterator[Finding | Waits]:
        found: Iterator[Finding | Waits] = importlib.import_module(f"ftlaunch.machine.{self.name}").probe(asked)
        return found

    def unknown(self, reason: str, verdict: Verdict, mend: str = "") -> Finding:
        """reason: a clause."""
        return Finding(self.answer, self.of, f"not known: {reason}", verdict, "", mend, {"probe": self.name})

    @property
    def answer(self) -> str:
        """The id of what is said in place of findings."""
        return f"{self.name.partition('_')[0]}.answer"


@dataclass(frozen=True)
class Silence:
    """Of a probe that was ended after `seconds`. quick: as was asked; told: ids of what it had found until then; waits:
    on whom, as it said itself.
    """

    probe: Probe
    seconds: float
    quick: bool
    told: frozenset[str]
    waits: str = ""

    @property
    def reason(self) -> str:
        return f"no answer within {self.seconds:.2g} s"

    def findings(self) -> list[Finding]:
        if not self.probe.silence:
            return [self.unknown()]
        found: list[Finding] = importlib.import_module(f"ftlaunch.machine.{self.probe.silence}").silent(self)
        return found

    def unknown(self) -> Finding:
        if self.quick:
            return self.probe.unknown(self.reason, "note", "ft doctor")
        return self.probe.unknown(self.reason, "note" if self.probe.late else "warn", self.probe.late)


COMPILES = "ft doctor once more: kernels are compiled the first time"
FACTS, QUICK = 6.0, 0.9  # seconds. A driver that has slept takes some for each GPU
PROBES = (
    Probe("cpu", "facts", "the CPU", FACTS, 1.05),
    Probe("memory", "facts", "memory", FACTS, QUICK),
    Probe("limits", "facts", "limits", FACTS, QUICK),
    Probe("disk", "facts", "the disk", FACTS, QUICK),
    Probe("gpu", "facts", "the GPU", FACTS, QUICK, silence="gpu_silence"),
    Probe("software", "facts", "what is installed", FACTS, QUICK),
    Probe("agents", "facts", "the agents", FACTS, QUICK),
    Probe("server", "facts", "the port", FACTS, QUICK, silence="server"),
    Probe("store", "facts", "the store", FACTS, QUICK),
    Probe("memory_read", "measure", "reading memory", 5.0),
    Probe("disk_read", "measure", "reading the disk", 3.0, 0.6),
    Probe("gpu_link", "measure", "the link to the GPU", 9.0, late=COMPILES),
    Probe("catalogue", "last", "the catalogue", 3.0, 0.7),
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
