"""Steps of `hybrid` that leave the CPU's lane alone, and go on with the same slots: against steps that all ask it, and
by the counters of the cache and of the lane."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.experts.rest import LaneRest
from ftengine.models.gpu.strategy import Strategy
from ftengine.scheduler.expert_stats import expert_stats
from tests.gpu.models import load_gpu, logits_of, prompt_of, setup, start, write

SLOTS = 3  # of 12 experts: something is always missing


class InTurn(LaneRest):
    """Rests in steps as a list says, again and again."""

    def __init__(self, turns: list[bool]) -> None:
        super().__init__()
        self.turns, self.asked = turns, 0

    def step(self, rows: int) -> bool:
        self.asked += 1
        rests = self.turns[self.asked % len(self.turns)]
        self.rested += rests
        return rests


@pytest.mark.parametrize("turns", [[True], [True, False], [False, True, True]])
def test_a_model_computes_the_same_in_either_form(turns: list[bool], tmp_path: Path, device: str) -> None:
    """Also where they alternate, with prompts in between, prefetching, admission, and rows of two sequences."""
    folder = write("qwen3.5", tmp_path / "model")
    prompts = [prompt_of(12, 1), prompt_of(9, 2)]
    found, counts = [], []
    for chosen in ([False], turns):
        model = load_gpu(folder, device)
        model.prepare(setup("hybrid", slots=SLOTS, threads=1, staging=32, rest="where faster"))
        experts = model.experts
        assert [experts.forms(rows) for rows in (1, 2, 3)] == [(True, False), (True, False), (True,)]
        experts.rest = InTurn(chosen)
        state = start(model)  # warms up in both forms
        before, computed = experts.pool.stats().total, experts.lane.counts().experts
        found.append(torch.cat(logits_of(state, prompts, 4, 6)))
        after = experts.pool.stats().total
        counted = {
            name: getattr(after, name) - getattr(before, name)
            for name in ("misses", "fetched", "cpu_experts", "admitted")
        }
        assert counted["cpu_experts"] == experts.lane.counts().experts - computed
        assert expert_stats(model).rest.steps == experts.rest.rested
        counts.append(SimpleNamespace(**counted))
        model.close()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    asking, mixed = counts
    assert asking.cpu_experts > 0
    assert mixed.fetched + mixed.cpu_experts == mixed.misses > 0
    if turns == [True]:
        assert (mixed.cpu_experts, mixed.admitted) == (0, 0)
        assert mixed.fetched == mixed.misses
    else:
        assert 0 < mixed.cpu_experts < mixed.misses
        assert mixed.fetched > 0


def test_each_form_has_its_own_number_of_prefetched_experts(tmp_path: Path, device: str) -> None:
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    model.prepare(setup("hybrid", slots=SLOTS, threads=1, staging=32, rest="at first"))
    experts, pool = model.experts, model.experts.pool
    assert experts.asking
    pool.set_prefetch(2)
    experts.wake(1)  # one sequence rests at first
    assert (experts.asking, pool.prefetch) == (False, 4)
    experts.wake(2)
    assert (experts.asking, pool.prefetch) == (True, 2)
    pool.set_prefetch(1)
    experts.wake(1)
    experts.wake()
    assert (experts.asking, pool.prefetch) == (False, 4)
    experts.wake(3)
    assert (experts.asking, pool.prefetch) == (True, 1)
    model.close()


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("offload", {}),
        ("cpu", {"slots": 0}),
        ("hybrid", {"rest": "never"}),
        ("hybrid", {"slots": 0}),
        ("hybrid", {"staging": 6}),  # of which the CPU's form leaves too few for what four sequences may miss
        ("hybrid", {"readable": False}),
    ],
)
def test_where_there_is_one_form(strategy: Strategy, changes: dict[str, object], tmp_path: Path, device: str) -> None:
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    model.prepare(setup(strategy, **{"slots": SLOTS, "threads": 1, "staging": 32, "rest": "where faster", **changes}))
    assert model.experts.forms(1) == (strategy != "offload",)
    assert model.experts.rest is None
    model.close()


@pytest.mark.parametrize("value", ["fixed", "0.5"])
def test_a_fixed_split_is_measured_alone(
    value: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_SPLIT", value)
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    model.prepare(setup("hybrid", slots=SLOTS, threads=1, staging=32, rest="where faster"))
    assert model.experts.rest is None
    model.close()
