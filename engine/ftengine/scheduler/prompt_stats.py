"""What the prompt cache did: for /v1/stats and the log, and a warning where it is on and does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ftengine.cache.reuse import Admission, ReuseCounts
from ftengine.cache.sequences import SequenceCache

LONG = 1024  # tokens; that a shorter prompt reuses nothing is no sign of anything
ENOUGH = 10  # such prompts, one after the other, that reused nothing: then no prompt begins like one before


class AdmissionStats(msgspec.Struct):
    """A request that began to run. Tokens, but for the words."""

    session: str  # made from the client's own key, or else a name of the server's own
    side: bool
    prompt: int
    reused: int
    tier: str  # "device", "host" or "disk"; "": nothing was reused
    boundary: str  # kind of the place it went on from; "": any token would do, or nothing was reused
    changed: int  # the first token that is new: to the session, or if that is new to any other, and to all tiers


class TierStats(msgspec.Struct):
    """Bytes, but for the counts. Since start, but for what there is now."""

    name: str
    budget: int
    used: int
    anchors: int  # places that prompts can go on from
    chunks: int  # of 512 tokens; the device has pages instead: see CacheCounts
    evictions: int
    written: int
    read: int
    failures: int  # records that were not what they should have been


class PromptStats(msgspec.Struct):
    """Tokens since start, where nothing else is said."""

    prompt: int
    reused: dict[str, int]  # by tier
    new: int  # computed for the first time
    repeated: int  # computed again, although some prompt had them: between where it went on and the first new token
    boundaries: dict[str, int]  # requests by the kind of place they went on from; "token": any token would do
    latest: list[AdmissionStats]  # oldest first
    tiers: list[TierStats]


def prompt_stats(cache: SequenceCache, running: int) -> PromptStats:
    """running: sequences that may run, and have slots if the model has a recurrent state."""
    counts = cache.reuse
    return PromptStats(
        prompt=counts.prompt_tokens,
        reused={tier: counts.tiers.get(tier, 0) for tier in ("device", "host", "disk")},
        new=counts.changed,
        repeated=counts.repeated,
        boundaries=dict(counts.kinds),
        latest=[_admission(each) for each in counts.recent],
        tiers=list(_tiers(cache, running)),
    )


def _admission(found: Admission) -> AdmissionStats:
    """`changed` as the front's log has it (api/calls.py): the disk may know prompts of servers before."""
    reused = found.reused
    kind = "" if reused.kind is None else reused.kind.value
    changed = max(reused.changed, reused.tokens)
    return AdmissionStats(found.session, found.side, found.prompt, reused.tokens, reused.tier, kind, changed)


def _tiers(cache: SequenceCache, running: int) -> Iterator[TierStats]:
    slot = cache.storage.page_bytes + cache.storage.state_bytes
    anchors = len(cache.tree.anchors)
    yield TierStats(
        name="device",
        budget=(cache.slots.count - (running if cache.has_state else 0)) * slot,
        used=anchors * slot,
        anchors=anchors,
        chunks=0,
        evictions=cache.anchor_evictions,
        written=0,
        read=0,
        failures=0,
    )
    if cache.tiers is not None:
        for sizes in cache.tiers.sizes():
            yield msgspec.convert(sizes, TierStats, from_attributes=True)


def is_on(cache: SequenceCache, running: int) -> bool:
    """Whether a prompt could reuse anything at all. running: as for `prompt_stats`."""
    return not cache.has_state or cache.slots.count > running or cache.tiers is not None


def describe(now: Mapping[str, int], before: Mapping[str, int]) -> str:
    """Tokens that each tier gave between the two, for the log."""
    since = {tier: tokens - before.get(tier, 0) for tier, tokens in now.items()}
    return ", ".join(f"{tokens} from {tier}" for tier, tokens in since.items() if tokens) or "nothing"


class Fruitlessness:
    """Notices that nothing is reused; tells of it once, until something is."""

    def __init__(self) -> None:
        self._seen = 0
        self._fruitless = 0  # long prompts that reused nothing, since one did

    def check(self, counts: ReuseCounts) -> str | None:
        """A sentence for the log. To be called before more prompts were admitted than `counts` remembers."""
        fresh = max(0, min(counts.prompts - self._seen, len(counts.recent)))
        self._seen = counts.prompts
        for admission in list(counts.recent)[len(counts.recent) - fresh :]:
            if admission.reused.tokens:
                self._fruitless = 0
            elif admission.prompt >= LONG:
                self._fruitless += 1
                if self._fruitless == ENOUGH:
                    return (
                        f"the prompt cache is on, and {ENOUGH} prompts of {LONG:,} tokens and more, one after the "
                        "other, reused nothing; the last one is like none before from its token "
                        f"{admission.reused.changed:,} on"
                    )
        return None
