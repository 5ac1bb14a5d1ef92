"""What a replay took, for people."""

from __future__ import annotations

from collections.abc import Iterable

from tests.prompts.replay import Step

COLUMNS = ("prompt", "changed", "computed", "allowed", "reused", "of last")
HEAD = f"{'request':36} {'kind':6} " + " ".join(f"{column:>8}" for column in COLUMNS)


def table(title: str, steps: Iterable[Step]) -> str:
    return "\n".join([title, HEAD, *map(_row, steps)])


def _row(step: Step) -> str:
    of_last = f"{min(step.reused, step.previous) / step.previous:8.2%}" if step.previous else ""
    return (
        f"{step.exchange.name:36} {step.kind:6} {step.length:8} {step.changed:8} {step.work.prompt:8} "
        f"{int(step.allowed):8} {step.reused:8} {of_last:8}  {step.told['tier']} {step.told['boundary']}"
    )
