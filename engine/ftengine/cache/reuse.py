"""What admitted prompts found in the caches, added up: for /v1/stats and the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ftengine.core import Reused

RECENT = 32


@dataclass(frozen=True)
class Admission:
    """One prompt. session: as Sessions names it; tokens throughout."""

    session: str
    side: bool
    prompt: int
    reused: Reused
    known: int  # of the prompt, how many at its start had ever been seen


@dataclass
class ReuseCounts:
    """Since start, in tokens where nothing else is said."""

    prompts: int = 0  # admitted requests
    hits: int = 0  # of those, that reused anything
    prompt_tokens: int = 0
    tiers: dict[str, int] = field(default_factory=dict)  # reused, by tier
    kinds: dict[str, int] = field(default_factory=dict)  # requests, by the kind of the place they went on from
    changed: int = 0  # that had to be computed: those after the first that differs
    repeated: int = 0  # computed although they had been seen: from the place gone on from to the first that differs
    recent: deque[Admission] = field(default_factory=lambda: deque(maxlen=RECENT))  # the last ones, oldest first

    def add(self, admission: Admission) -> None:
        prompt, reused = admission.prompt, admission.reused
        self.prompts += 1
        self.prompt_tokens += prompt
        self.changed += prompt - max(admission.known, reused.tokens)
        self.repeated += max(0, admission.known - reused.tokens)
        if reused.tokens:
            self.hits += 1
            self.tiers[reused.tier] = self.tiers.get(reused.tier, 0) + reused.tokens
            kind = "token" if reused.kind is None else reused.kind.value
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.recent.append(admission)
