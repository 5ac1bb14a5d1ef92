"""Experts copied before their layer begins: the lists against the plain rules of cache_model.py, the blocks against the
banks, what a step computes with them against the CPU's decoder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftengine.errors import ConfigError
from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import LaneCosts
from ftengine.formats.format import F16
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton import prefetch
from ftengine.kernels.triton.buffers import RouteBuffers
from ftengine.kernels.triton.fetch import admit, fetch
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.victims import end_step
from ftengine.memory.estimate import weight_sizes
from ftengine.models.gpu.next_routers import next_routers
from ftengine.models.gpu.setup import prefetch_asked_for
from ftengine.models.gpu.strategy import PREFETCH, Strategy
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source
from tests.gpu.cache_model import CacheModel
from tests.gpu.cache_setup import HIDDEN, held_by, make_banks, make_mailbox
from tests.gpu.models import load_gpu, logits_of, prompt_of, setup, start, write

LAYERS, EXPERTS, TOP_K = 3, 16, 4
COSTS = LaneCosts(3.0, 35.0, 8.0, 26.0)


class Steps:
    """Random decode steps of a pool and of the model of it, each layer's routing foretold but for some noise."""

    def __init__(self, slots: int, tokens: int, most: int, ahead: int, policy: str, cpu: bool, device: str) -> None:
        self.banks: dict[int, ExpertBank] = make_banks(LAYERS, EXPERTS, device)
        staging = tokens * TOP_K
        self.pool = SlotPool(self.banks, slots, staging + ahead, TOP_K, device, costs=COSTS, policy=policy, ahead=ahead)
        self.pool.set_prefetch(most)
        self.model = CacheModel(LAYERS, slots, staging, COSTS, cpu=cpu, ahead=ahead)
        self.buffers = RouteBuffers.allocate(tokens, TOP_K, device)
        self.mailbox = make_mailbox(tokens, TOP_K, device) if cpu else None
        self.tokens, self.most, self.policy, self.device = tokens, most, policy, device
        self.listed = self.used = self.staged = 0

    def step(self) -> None:
        logits = [
            torch.randn(self.tokens, EXPERTS, device=self.device) + _taste(layer, self.device)
            for layer in range(LAYERS)
        ]
        for layer in range(LAYERS):
            said = [] if layer == 0 else self.foretell(layer, logits[layer])
            self.layer(layer, logits[layer], said)
        end_step(self.pool.tensors)
        score = self.pool.tensors.score.tolist()
        self.model.end_step({(layer, e): score[layer][e] for layer in range(LAYERS) for e in range(EXPERTS)})
        table = self.pool.tensors.table
        keys = [(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
        held = {key: int(table[key]) for key in keys if table[key] >= 0}
        assert held == self.model.table
        assert all(held_by(self.pool, slot) == layer * EXPERTS + e for (layer, e), slot in held.items())

    def foretell(self, layer: int, logits: torch.Tensor) -> list[tuple[int, int]]:
        guess = logits + 0.8 * torch.randn_like(logits)
        chances = guess.softmax(-1)
        best = guess.topk(TOP_K).indices
        mass: dict[int, float] = {}
        for row, ids in enumerate(best.tolist()):
            for expert in ids:
                mass[expert] = mass.get(expert, 0.0) + float(chances[row, expert])
        now = self._now(layer)
        old = self.pool.tensors.score[layer].tolist()
        fresh = {
            e: now if self.policy == "lru" else math.log2(max(2.0 ** (old[e] - now) + m, 1e-37)) + now
            for e, m in mass.items()
        }
        expected = self.model.prefetch(layer, mass, fresh, self.most)
        prefetch.choose(self.pool.tensors, layer, guess, TOP_K)
        prefetch.copy(self.pool.tensors, layer, self.banks[layer])
        line = self.pool.tensors.prefetch[layer].tolist()
        count = line[at.PREFETCH_LIST.value]
        experts, slots = (line[first.value :][:count] for first in (at.PREFETCH_EXPERT, at.PREFETCH_SLOT))
        assert list(zip(experts, slots, strict=True)) == expected
        assert all(held_by(self.pool, slot) == layer * EXPERTS + expert for expert, slot in expected)
        return expected

    def _now(self, layer: int) -> float:
        tick = int(self.pool.tensors.state[at.TICK.value])
        return tick + layer / LAYERS if self.policy == "lru" else tick / at.HALF_LIFE.value

    def layer(self, layer: int, logits: torch.Tensor, said: list[tuple[int, int]]) -> None:
        pool = self.pool.tensors
        before = self.pool.stats().layers[layer]
        worths = dict(enumerate(pool.score[layer].tolist()))
        hidden = torch.randn(self.tokens, HIDDEN, device=self.device)
        route(pool, layer, logits, hidden, TOP_K, True, self.buffers, self.mailbox, prefetched=layer > 0)
        fetch(pool, layer, self.banks[layer], self.buffers)
        admit(pool, layer, self.banks[layer])
        after = dict(enumerate(pool.score[layer].tolist()))
        ids = list(dict.fromkeys(logits.topk(TOP_K).indices.flatten().tolist()))
        decision = self.model.route(layer, ids, worths if self.policy == "lru" else after, after)
        fetched = int(self.buffers.fetch.count)
        found = zip(
            self.buffers.fetch.expert[:fetched].tolist(), self.buffers.fetch.slot[:fetched].tolist(), strict=True
        )
        assert list(found) == decision.fetched
        self.check_waits(layer, decision.hits, fetched, dict(said))
        if layer > 0:
            wanted = [expert in ids for expert, _ in said]
            awaited = max((place + 1 for place, used in enumerate(wanted) if used), default=0)
            assert int(pool.prefetch[layer, at.PREFETCH_AWAITED.value]) == awaited
            now = self.pool.stats().layers[layer]
            assert now.prefetched - before.prefetched == 0  # counted when they were chosen
            assert now.foretold - before.foretold == sum(wanted)
            self.listed, self.used = self.listed + len(said), self.used + sum(wanted)
            self.staged += sum(slot >= self.pool.tensors.slots for _, slot in said)

    def check_waits(self, layer: int, hits: list[int], fetched: int, said: dict[int, int]) -> None:
        """First come those that wait for no copy: hits that lay in slots before."""
        chosen = self.buffers.chosen
        count, ready = int(chosen.count), int(chosen.ready)
        assert count == len(hits) + fetched
        turns = chosen.turn[:count].tolist()
        assert sorted(turns) == list(range(count))
        at_once = {int(chosen.slot[u]) for u in turns[:ready]}
        later = {int(chosen.slot[u]) for u in turns[ready:]}
        assert later >= {slot for expert, slot in said.items() if expert in hits}
        assert at_once == {self.model.table[layer, expert] for expert in hits if expert not in said}


def _taste(layer: int, device: str) -> torch.Tensor:
    """What stays from step to step."""
    return 1.5 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(layer)).to(device)


@pytest.mark.parametrize(
    ("slots", "tokens", "most", "ahead", "policy", "cpu"),
    [
        (12, 1, 2, 4, "aged", True),
        (12, 3, 8, 8, "aged", True),
        (20, 2, 4, 0, "lru", True),
        (9, 2, 8, 4, "aged", False),
        (40, 1, 8, 2, "aged", True),  # all but a few fit
    ],
)
def test_lists_follow_the_rules(
    slots: int, tokens: int, most: int, ahead: int, policy: str, cpu: bool, device: str
) -> None:
    torch.manual_seed(slots + tokens)
    steps = Steps(slots, tokens, most, ahead, policy, cpu, device)
    for _ in range(5):
        steps.step()
    assert steps.listed > steps.used > 0  # some guesses were right and some wrong
    assert (steps.staged > 0) == (slots < 20)  # what beats no victim
    total = steps.pool.stats().total
    assert (total.prefetched, total.foretold) == (steps.listed, steps.used)
    assert int(steps.pool.tensors.state[at.COPYING.value]) == 0


def test_what_is_still_to_be_copied_leaves_less_room(device: str) -> None:
    """Four may be listed, two are on their way."""
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 30, 8, TOP_K, device)
    pool.set_prefetch(4)
    pool.tensors.state[at.COPYING.value] = 2
    prefetch.choose(pool.tensors, 2, torch.arange(float(EXPERTS), device=device)[None], TOP_K)
    assert _listed(pool, 2) == [EXPERTS - 1, EXPERTS - 2]  # the most probable ones
    assert int(pool.tensors.state[at.COPYING.value]) == 4


def test_a_layer_rests_whose_lists_are_of_little_use(device: str) -> None:
    """Guesses that are always wrong: after some of them there is one in sixteen; right ones bring them back."""
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 30, 8, TOP_K, device, ahead=4)
    pool.set_prefetch(2)
    buffers = RouteBuffers.allocate(1, TOP_K, device)

    def lists(steps: int, right: bool) -> list[int]:
        found = []
        for _ in range(steps):
            logits = torch.randn(1, EXPERTS, device=device)
            pool.tensors.table.fill_(-1)
            prefetch.choose(pool.tensors, 1, logits if right else -logits, TOP_K)
            prefetch.copy(pool.tensors, 1, banks[1])
            found.append(len(_listed(pool, 1)))
            hidden = torch.zeros(1, HIDDEN, device=device)
            route(pool.tensors, 1, logits, hidden, TOP_K, True, buffers, None, prefetched=True)
            fetch(pool.tensors, 1, banks[1], buffers)
            end_step(pool.tensors)
        return found

    assert lists(12, right=False) == 12 * [2]
    assert sum(map(bool, lists(32, right=False)[16:])) == 1
    trusted = [bool(count) for count in lists(80, right=True)]
    assert not all(trusted[:40])
    assert all(trusted[-20:])


def test_now_and_then_nothing_is_listed(device: str) -> None:
    """A layer in 64, whatever its guesses were worth: what it takes without copies is learnt from those."""
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 30, 8, TOP_K, device, ahead=4)
    pool.set_prefetch(2)
    counts = []
    for tick in range(64):
        pool.tensors.state[at.TICK.value] = tick
        pool.tensors.table.fill_(-1)
        pool.tensors.state[at.COPYING.value] = 0
        prefetch.choose(pool.tensors, 1, torch.randn(1, EXPERTS, device=device), TOP_K)
        counts.append(len(_listed(pool, 1)))
    assert sorted(counts) == [0, *63 * [2]]


def _listed(pool: SlotPool, layer: int) -> list[int]:
    line = pool.tensors.prefetch[layer].tolist()
    return line[at.PREFETCH_EXPERT.value :][: line[at.PREFETCH_LIST.value]]


def test_as_many_are_listed_as_may_be(device: str) -> None:
    """The missing ones of those that a token would be routed to, the most probable first."""
    pool = SlotPool(make_banks(LAYERS, EXPERTS, device), 30, 8, TOP_K, device)
    chances = torch.full((EXPERTS,), 0.01)
    chances[[3, 5, 9, 11]] = torch.tensor([0.4, 0.2, 0.18, 0.1])
    logits = chances.log().to(device)[None]
    for most, expected in ((8, [3, 9, 11]), (2, [3, 9]), (0, [])):
        pool.set_prefetch(most)
        pool.tensors.table.fill_(-1)
        pool.tensors.table[1, 5] = 29
        pool.tensors.state[at.COPYING.value] = 0
        prefetch.choose(pool.tensors, 1, logits, TOP_K)
        assert _listed(pool, 1) == expected
    for wrong in (-1, 9):
        with pytest.raises(ValueError, match="0 to 8 experts"):
            pool.set_prefetch(wrong)


@pytest.mark.parametrize("strategy", ["offload", "hybrid"])
def test_a_model_computes_the_same(strategy: Strategy, tmp_path: Path, device: str) -> None:
    """Logits with and without prefetching; and it did something, for rows of different sequences."""
    folder = write("qwen3.5", tmp_path / "model")
    prompts = [prompt_of(9, seed) for seed in (1, 2)]
    found, counts = [], []
    for most in (0, 4):
        model = load_gpu(folder, device)
        model.prepare(setup(strategy, slots=6, threads=1, prefetch=most))
        found.append(torch.cat(logits_of(start(model), prompts, 4, 6)))
        counts.append(model.experts.pool.stats().total)
        model.close()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    assert (counts[0].prefetched, counts[0].foretold) == (0, 0)
    assert counts[1].prefetched >= counts[1].foretold > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_starts_whose_routers_foretell_nothing(
    layers: int, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer with experts, or routers in a format that is not asked early: nothing is joined that was not begun."""
    folder = write("qwen3", tmp_path / "model") if layers == 1 else write("mixtral", tmp_path / "model")
    model = load_gpu(folder, device)
    if layers == 2:
        monkeypatch.setattr("ftengine.models.gpu.experts.next_routers", lambda moes: {})
    model.prepare(setup("offload", slots=2, threads=1))
    (found,) = logits_of(start(model), [prompt_of(9)], 5, 4)
    assert found.isfinite().all()
    pool = model.experts.pool
    assert (pool.prefetch, pool.tensors.ahead, pool.stats().total.prefetched) == (0, 0, 0)
    model.close()


def test_routers_in_f16_foretell(tmp_path: Path, device: str) -> None:
    folder = write("qwen3.5", tmp_path / "model")
    tiny_file = next(folder.glob("*.safetensors"))
    tensors = {name: tensor.half() if "mlp.gate." in name else tensor for name, tensor in load_file(tiny_file).items()}
    save_file(tensors, tiny_file, metadata={"format": "pt"})
    model = load_gpu(folder, device)
    assert next_routers(model.weights.moes)[0].format is F16
    model.prepare(setup("offload", slots=6, threads=1))
    logits_of(start(model), [prompt_of(9)], 5, 4)
    assert model.experts.pool.stats().total.prefetched > 0
    model.close()


def test_a_slow_link_begins_without(tmp_path: Path, device: str) -> None:
    """Over which one expert takes longer than two layers."""
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    for b_link, most, expected in ((35.0, 8, 4), (35.0, 2, 2), (400.0, 8, 0)):
        model.prepare(setup("offload", slots=6, threads=1, prefetch=most, costs=LaneCosts(3.0, b_link, 28.0, 20.0)))
        assert model.experts.pool.prefetch == expected
    model.close()


def test_staging_is_left_to_what_is_fetched(tmp_path: Path, device: str) -> None:
    """Two experts a token of six, in four rows at the most: six places for `offload`, half of all for `hybrid`."""
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    for strategy, staging, expected in (("offload", 16, 10), ("offload", 6, 0), ("hybrid", 8, 4), ("hybrid", 40, 16)):
        model.prepare(setup(strategy, slots=6, threads=1, staging=staging))
        assert model.experts.pool.tensors.ahead == expected
    model.close()


def test_the_next_router_speaks_of_this_norm(tmp_path: Path, device: str) -> None:
    """Against the formula: the next layer's router of x / rms(x) times its own norm's weights."""
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    this, following = model.weights.moes
    made = next_routers(model.weights.moes)
    assert list(made) == [0]
    x = torch.randn(5, model.weights.hidden, dtype=torch.float64)
    even = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    router = following.projection.parts[0].codes[: following.experts].cpu().double()
    expected = (even * following.norm.weight.cpu().double()) @ router.T
    found = (even * this.norm.weight.cpu().double()) @ made[0].codes.cpu().double().T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3.5"])
def test_the_plan_counts_what_is_made(kind: str, tmp_path: Path, device: str) -> None:
    folder = write(kind, tmp_path / "model")
    checkpoint = Checkpoint.open(folder)
    with open_source(checkpoint) as source:
        sizes = weight_sizes(source, checkpoint.text_config)
    made = next_routers(load_gpu(folder, device).weights.moes)
    assert sum(router.codes.nbytes for router in made.values()) == sizes.next_routers > 0


@pytest.mark.parametrize("strategy", ["resident", "cpu"])
def test_no_router_is_asked_early_where_nothing_can_be_copied(
    strategy: Strategy, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftengine.models.gpu.experts.next_routers", lambda moes: pytest.fail("routers were made"))
    model = load_gpu(write("qwen3.5", tmp_path / "model"), device)
    model.prepare(setup(strategy, threads=1))
    model.close()


def test_how_many_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefetch_asked_for() == PREFETCH
    monkeypatch.setenv("FT_PREFETCH", "0")
    assert prefetch_asked_for() == 0
    for text in ("many", "", "-1", "9", "08", "\N{ARABIC-INDIC DIGIT FOUR}", 5000 * "1"):
        monkeypatch.setenv("FT_PREFETCH", text)
        with pytest.raises(ConfigError, match=f"FT_PREFETCH is '{text}'") as caught:
            prefetch_asked_for()
        assert caught.value.next_step == "unset FT_PREFETCH"
