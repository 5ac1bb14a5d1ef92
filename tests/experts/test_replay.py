"""Replayed traces against a naive cache of lists, and against the simulator that the policies were chosen with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ftengine.experts.replay import POLICIES, replay
from ftengine.experts.trace import Trace, load_trace

PEERS = Path(__file__).parents[3] / "shared" / "peers"
RECORDED = PEERS / "trace_tiny_moe.npz"


def random_trace(steps: int = 60, layers: int = 3, experts: int = 12, top_k: int = 3) -> Trace:
    random = np.random.default_rng(1)
    taste = 2 * random.standard_normal((layers, experts))
    logits = taste + random.standard_normal((steps, layers, experts))
    mass = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    near = np.argsort(-logits, -1)[:, :, :6]
    return Trace(near[:, :, :top_k], near, np.take_along_axis(mass, near, -1).astype(np.float32), experts)


def naive(trace: Trace, slots: int, policy: str) -> list[int]:
    """Hits a step. One list of residents; the victim is found by looking at all."""
    residents: list[tuple[int, int]] = []
    used: dict[tuple[int, int], int] = {}
    score: dict[tuple[int, int], float] = {}
    hits = []
    for step in range(trace.steps):
        score = {key: value / 2 ** (1 / 8) for key, value in score.items()}
        found = 0
        for layer in range(trace.layers):
            for expert, mass in zip(trace.near[step, layer], trace.probabilities[step, layer], strict=True):
                score[layer, expert] = score.get((layer, expert), 0.0) + float(mass) + 1e-6
            wanted = [(layer, int(expert)) for expert in trace.ids[step, layer]]
            missing = [key for key in wanted if key not in residents]
            found += len(wanted) - len(missing)
            for place, key in enumerate(wanted):
                used[key] = (step * trace.layers + layer) * 100 + place
            for key in missing:
                if len(residents) == slots:
                    others = [other for other in residents if other not in wanted]
                    if not others:
                        continue
                    residents.remove(min(others, key=worth(trace, policy, used, score, step, layer)))
                residents.append(key)
        hits.append(found)
    return hits


def worth(trace, policy, used, score, step, layer):
    if policy == "lru":
        return used.__getitem__
    if policy == "aged":
        return lambda key: score[key]

    def until_next(key: tuple[int, int]) -> float:
        later = trace.ids[step + (key[0] <= layer) :, key[0]]
        uses = np.flatnonzero((later == key[1]).any(-1))
        return -float((uses[0] + (key[0] <= layer)) * trace.layers + key[0]) if len(uses) else -np.inf

    return until_next


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [4, 12, 30, 36])
def test_hits_as_a_naive_cache_counts_them(policy: str, slots: int) -> None:
    trace = random_trace()
    expected = naive(trace, slots, policy)
    assert replay(trace, slots, policy).hits == sum(expected)
    assert replay(trace, slots, policy, warm=20).hits == sum(expected[20:])


def test_edges() -> None:
    trace = random_trace(steps=5)
    for policy in POLICIES:
        assert replay(trace, 0, policy).hits == 0
        distinct = len({(layer, int(e)) for layer in range(3) for e in trace.ids[:, layer].flatten()})
        assert replay(trace, 36, policy).hits == 5 * 3 * 3 - distinct
    with pytest.raises(ValueError, match="of 5 steps 5"):
        replay(trace, 4, "lru", warm=5)


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the recorded trace in ../shared/peers")
@pytest.mark.parametrize(("policy", "victim"), [("lru", "lru"), ("aged", "ema:8"), ("belady", "belady")])
def test_within_a_point_of_the_simulator(policy: str, victim: str) -> None:
    simulator = load_simulator()
    trace, steps, slots = load_trace(RECORDED), 400, 192
    cut = Trace(trace.ids[:steps], trace.near[:steps], trace.probabilities[:steps], trace.experts)
    miss = simulator.run(simulator.load(str(RECORDED)).cut(0, steps), 0.25, victim=victim, scope="global")["miss"]
    assert replay(cut, slots, policy, warm=steps // 4).hit_rate == pytest.approx(1 - miss, abs=0.01)


def load_simulator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_cache_sim", PEERS / "expert_cache_sim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
