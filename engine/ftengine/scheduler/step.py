"""A step that was begun, from its launch to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftengine.core import Sequence
from ftengine.models.base import Pending
from ftengine.scheduler.batch import Work
from ftengine.scheduler.jobs import Job
from ftengine.scheduler.sampler import Choice

if TYPE_CHECKING:
    from ftengine.scheduler.device_sampler import Drawn

Choices = Callable[[], list[Choice | None]]  # gives the tokens of a step once it has ended


@dataclass(frozen=True)
class Step:
    """What was begun. pending: its end, or what made the launch fail."""

    work: list[Work]
    sampling: list[Job]  # whose next token comes of it, in the order of logits
    prefilled: int  # tokens
    started: float  # time.perf_counter()
    pending: Pending[Choices] | Exception
    drawn: Drawn | None  # what the device samples
    discarded: set[Sequence] = field(default_factory=set)  # that ended, or begin anew, since the launch
    parting: set[Sequence] = field(default_factory=set)  # that ended since: only their state is still awaited

    @property
    def live(self) -> list[Work]:
        """What its end gives a token to."""
        return [item for item in self.work if item.sequence not in self.discarded | self.parting]

    def computes(self, sequence: Sequence) -> bool:
        return any(item.sequence is sequence for item in self.work) and sequence not in self.discarded
