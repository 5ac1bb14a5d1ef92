"""What a probe finds, and how good or bad that is. docs/doctor.md lists the findings and is their schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

Verdict = Literal["ok", "note", "warn", "bad"]  # as it should be; to be known; costs speed; something does not work
SEVERITY: dict[str, int] = {verdict: place for place, verdict in enumerate(get_args(Verdict))}
EXIT = {"ok": 0, "note": 0, "warn": 3, "bad": 4}  # 1 and 2 are a failed command's and wrong usage's


@dataclass(frozen=True)
class Finding:
    """id: group and name, such as "gpu.link"; the same one may be found of each GPU. value: for a person.

    cost: what the verdict costs; mend: the command or setting that helps. Empty where there is none.
    data: numbers for programs: bytes, bytes a second, microseconds as their names say; None for what is not known.
    """

    id: str
    label: str
    value: str
    verdict: Verdict = "ok"
    cost: str = ""
    mend: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    def but(self, verdict: Verdict, cost: str = "", mend: str = "") -> Finding:
        """The same with a verdict."""
        return replace(self, verdict=verdict, cost=cost, mend=mend)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "group": self.group, "cost": self.cost or None, "mend": self.mend or None}


def from_json(found: dict[str, Any]) -> Finding:
    """Raises TypeError, KeyError or ValueError for what is no finding."""
    given = {name: found[name] or "" for name in ("id", "label", "value", "cost", "mend")}
    if not all(isinstance(text, str) for text in given.values()) or not isinstance(found["data"], dict):
        raise TypeError("not a finding")
    if found["verdict"] not in SEVERITY:
        raise ValueError(f"no verdict: {found['verdict']!r}")
    return Finding(**given, verdict=found["verdict"], data=found["data"])


def worst(findings: Iterable[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), key=SEVERITY.__getitem__, default="ok")


def gib(size: float) -> str:
    """Memory, in the unit that memory is sold in."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def rate(bytes_per_second: float) -> str:
    digits = 0 if bytes_per_second >= 1e11 else 1
    return f"{bytes_per_second / 1e9:.{digits}f} GB/s"


def plural(count: int, one: str) -> str:
    return f"{count} {one}{'' if count == 1 else 's'}"
