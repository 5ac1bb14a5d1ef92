"""What a kept place in a path of tokens is worth, and so what goes first when room is short. Torch-free.

The same rule holds for the device, host memory and disk: what it would cost to compute again, times how likely it is
to be wanted, for each byte that it takes. Above that rule stand the conversations that are going on: see `rank`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.cache.sessions import Sessions
from ftengine.core import BoundaryKind

HALF_LIFE = 600.0  # seconds after which a place is half as likely to be wanted
MOST_USES = 8  # more say nothing new

# How often a client's next prompt departs just there, in proportion; from recordings of coding agents. Most go on where
# the last prompt or answer ended; some move or drop the last user message, replace old results, or start over. With a
# new question many templates drop all reasoning since the one before.
LIKELIHOOD = {
    BoundaryKind.SYSTEM: 8.0,
    BoundaryKind.LAST_USER: 6.0,
    BoundaryKind.QUESTION_END: 6.0,
    BoundaryKind.PROMPT_END: 3.0,
    BoundaryKind.ANSWER_END: 3.0,
    BoundaryKind.MESSAGE: 2.0,
    BoundaryKind.RESULT_START: 2.0,
    BoundaryKind.RESULT_END: 1.0,
    BoundaryKind.THINKING: 1.0,
    BoundaryKind.CALL_START: 0.5,
    BoundaryKind.CALL_END: 0.5,
    BoundaryKind.SPACING: 0.5,
}
ENDS = (BoundaryKind.PROMPT_END, BoundaryKind.ANSWER_END)


@dataclass
class Worth:
    """Of one kept place. Changed by who keeps it, when it is used.

    session: as Sessions.begin names it
    last_used: seconds, on the clock of `rank`'s now
    uses: by requests that went on from here
    saved: tokens that would have to be computed again without it
    bytes: that going frees
    position: tokens before it
    turn: number of the session's turn that made it, or that went on from it last; 0: of an earlier process
    """

    kind: BoundaryKind
    session: str
    side: bool
    last_used: float
    uses: int = 0
    saved: int = 0
    bytes: int = 0
    position: int = 0
    turn: int = 0

    def use(self, session: str, side: bool, turn: int, now: float) -> None:
        """A request of that session goes on from here. What main conversations share stays theirs."""
        if self.side or not side:
            self.session, self.side, self.turn = session, side, turn
        self.last_used = now
        self.uses += 1


def rank(worth: Worth, sessions: Sessions, now: float) -> tuple[int, float]:
    """What has the lowest goes first: group, then value.

    Group 0: side requests, conversations that are over, and what a live one has since cut off; 1: of live main
    conversations; 2: of those, the end of tools and system text, and where the last prompt or answer ended.
    """
    group = 0
    if not worth.side and sessions.live(worth.session, now):
        system = worth.kind is BoundaryKind.SYSTEM
        last = worth.kind in ENDS and worth.turn == sessions.turn(worth.session)
        if not sessions.superseded(worth.session, worth.turn, worth.position):
            group = 2 if system or last else 1
    return group, value(worth, now)


def value(worth: Worth, now: float) -> float:
    """Tokens of work expected to be saved, for each byte."""
    fresh = HALF_LIFE / (HALF_LIFE + max(0.0, now - worth.last_used))
    likely = LIKELIHOOD[worth.kind] * (1 + min(worth.uses, MOST_USES)) * fresh
    return likely * max(1, worth.saved) / max(1, worth.bytes)
