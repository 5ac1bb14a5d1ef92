"""When the log warns of a prompt cache that is of no use, and how it tells what was reused."""

from __future__ import annotations

import pytest

from ftengine.api.answer import Usage
from ftengine.api.calls import reuse_text
from ftengine.cache.reuse import Admission, ReuseCounts
from ftengine.core import BoundaryKind, Reused
from ftengine.scheduler.prompt_stats import ENOUGH, LONG, Fruitlessness, describe, prompt_stats
from tests.cache.plain import make_cache


class Log:
    """Admits prompts, and collects what is said of them."""

    def __init__(self) -> None:
        self.counts = ReuseCounts()
        self.noticed = Fruitlessness()

    def admit(self, *prompts: tuple[int, int]) -> list[str]:
        """Tokens of each, and how many were reused; all of them between two looks."""
        for length, reused in prompts:
            found = Reused(reused, "device" if reused else "", None, changed=7)
            self.counts.add(Admission("s", False, length, found, reused))
        sentence = self.noticed.check(self.counts)
        return [] if sentence is None else [sentence]


@pytest.mark.parametrize("together", [1, 5, ENOUGH])
def test_ten_long_prompts_that_reuse_nothing(together: int) -> None:
    log = Log()
    said = [log.admit(*[(LONG, 0)] * together) for _ in range(ENOUGH // together)]
    assert said[:-1] == [[]] * (len(said) - 1)
    assert "10 prompts of 1,024 tokens and more, one after the other, reused nothing" in said[-1][0]
    assert "from its token 7 on" in said[-1][0]
    assert [log.admit((LONG, 0)) for _ in range(100)] == [[]] * 100  # told once


def test_what_is_no_sign_of_anything() -> None:
    log = Log()
    assert [log.admit((LONG - 1, 0)) for _ in range(100)] == [[]] * 100
    assert [log.admit((LONG, 0), (LONG, 1)) for _ in range(100)] == [[]] * 100


def test_told_again_after_it_worked() -> None:
    log = Log()
    told = [log.admit((5000, 0)) for _ in range(ENOUGH)] + [log.admit((5000, 4000))]
    told += [log.admit((5000, 0)) for _ in range(ENOUGH)]
    assert [len(said) for said in told] == [0] * (ENOUGH - 1) + [1, 0] + [0] * (ENOUGH - 1) + [1]


def test_nobody_looks_for_long() -> None:
    """More were admitted than are remembered."""
    log = Log()
    assert len(log.admit(*[(LONG, 0)] * 500)) == 1
    assert log.admit() == []


def test_tokens_by_tier_since() -> None:
    assert describe({"device": 500, "disk": 20}, {"device": 100, "disk": 20}) == "400 from device"
    assert describe({"device": 500, "disk": 20}, {}) == "500 from device, 20 from disk"
    assert describe({"device": 500}, {"device": 500}) == "nothing"


@pytest.mark.parametrize(
    ("reused", "changed", "new_from"),
    [
        (Reused(1963, "disk", BoundaryKind.PROMPT_END, changed=0), 0, 1963),  # of a server before: no session knows it
        (Reused(1963, "device", BoundaryKind.LAST_USER, changed=1970), 0, 1970),
        (Reused(0, "", None, changed=12), 12, 12),
    ],
)
def test_the_first_new_token_is_the_one_that_the_log_tells(reused: Reused, changed: int, new_from: int) -> None:
    cache = make_cache()
    cache.reuse.add(Admission("s", False, 1980, reused, changed))
    (found,) = prompt_stats(cache, running=1).latest
    assert (found.reused, found.changed) == (reused.tokens, new_from)
    text = reuse_text(Usage(prompt=1980, cached=reused.tokens), reused)
    assert text.endswith(f"new from {new_from}")
