"""Random conversations, edited as agents edit them, come out as if computed cold, and what an edit left is not computed
again.

The cold run has no scheduler and no cache: one forward over the whole path (tests/models/driver.py). Given the same
tokens before, its likeliest token at each place must be the one that was generated; so the tokens are a cold run's own.

    python -m pytest tests/prompts/test_edits.py -m slow -rP    # 500 sequences of each architecture
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ftengine.config import EngineConfig
from ftengine.core import Boundary, FinishReason
from ftengine.models.base import Model
from tests.models.driver import prefill_logits
from tests.prompts import small_models
from tests.prompts.driver import Answer, PromptEngine
from tests.prompts.edits import EDITS, Talk
from tests.prompts.forced import ForcedModel, WatchedModel
from tests.prompts.loaded import CONTEXT, KINDS, VOCABULARY, Load, Loaded
from tests.prompts.replay import SPACING, Known
from tests.prompts.small_models import Budgets

TURNS = 7  # requests of a sequence
TIE = 1e-4  # of two logits: float32 sums in another order may exchange them
NEAR = 1e-3  # of two logarithms of a probability
OTHER_CUTS = (16, 64, 7)  # tokens a step
MOST_TIES = 0.01  # of the requests


@dataclass
class Story:
    """One random sequence: two sessions on one engine, its budgets and what happens between two requests.

    ample: everything fits, and nothing but edits happens
    """

    seed: int
    loaded: Loaded
    cache_dir: Path
    ample: bool
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.model = self.loaded.model
        self.watched = WatchedModel(self.model)
        self.config = _config(self.choose, self.loaded, self.cache_dir, self.ample)
        self.known = Known()
        self.open()
        talk = Talk("a", self.choose, VOCABULARY, (5, 60) if self.choose.random() < 0.5 else (40, 700))
        system = talk.system(self.choose.choice((30, 300, 1200)))
        other = Talk("b", self.choose, VOCABULARY, talk.sizes)
        self.talks = [talk.begin(system), other.begin(system if self.choose.random() < 0.5 else other.system(90))]

    def open(self) -> None:
        self.engine = PromptEngine(self.watched, self.config)

    def run(self) -> None:
        for _ in range(TURNS):
            talk = self.choose.choice(self.talks)
            edit = self.choose.choice(EDITS)
            edit(talk)
            self.events[edit.__name__] += 1
            if len(talk.prompt()[0]) > CONTEXT - 64:
                EDITS[-1](talk)
            if not self.ample:
                self.disturb()
            self.request(talk)
            self.engine.check()
        self.engine.close()

    def request(self, talk: Talk) -> None:
        (prompt, boundaries), count = talk.prompt(), self.choose.randint(1, 10)
        kind = self.choose.choice(("whole", "whole", "whole", "prefill", "decode", "beside"))
        beside = None
        if kind == "beside" and not self.ample:
            other = self.choose.choice(self.talks).prompt()
            beside = (*other, self.engine.submit(*other, 4, session="c", side=self.choose.random() < 0.5))
        name = self.engine.submit(prompt, boundaries, count, session=talk.name)
        if kind in ("prefill", "decode"):
            self.cancel(name, kind)
        self.engine.finish()
        answer = self.engine.answers[name]
        self.compare(prompt, answer)
        if beside is not None:
            self.compare(beside[0], self.engine.answers[beside[2]])
        if self.ample:
            self.check_start(prompt, boundaries)
        self.events[kind] += 1
        if answer.reused is not None and answer.reused.tier:
            self.events[f"from {answer.reused.tier}"] += 1
        if answer.finish is FinishReason.LENGTH:
            talk.answered(answer.tokens)

    def cancel(self, name: str, kind: str) -> None:
        answer = self.engine.answers[name]
        for _ in range(self.choose.randint(1, 3)):
            self.engine.step()
        while kind == "decode" and not answer.tokens and answer.finish is None:
            self.engine.step()
        if answer.finish is None:
            self.engine.cancel(name)

    def compare(self, prompt: list[int], answer: Answer) -> None:
        """With the cold run; where a router's choice hangs on the last bit, with one that is cut into other steps."""
        if not answer.tokens:
            return
        path = prompt + answer.tokens[:-1]
        fault = _fault(answer, _cold(self.model, path))
        if fault and not all(_fault(answer, _cold(self.model, path, chunk)) for chunk in OTHER_CUTS):
            self.events["tie"] += 1
        elif fault:
            self.wrong.append(f"seed {self.seed}: {fault}")

    def check_start(self, prompt: list[int], boundaries: list[Boundary]) -> None:
        """Against the oracle: the tokens of all that was computed, and the places that were told of it."""
        work = self.watched.work[-1]
        changed, told = self.known.reach(prompt)
        least = max(told, changed - SPACING) if self.model.cache_layout.states else changed
        if not least <= work.start <= changed:
            self.wrong.append(f"seed {self.seed}: began at {work.start}, not in {least}..{changed} of {len(prompt)}")
        # Places are kept where the request computes. A prompt's last token is computed again for its logits: the place
        # kept at its end lies before that one.
        places = {each.position - (each.position == len(prompt)) for each in boundaries} | {work.end}
        path = prompt + self.engine.answers[work.request.id].tokens
        self.known.add(path[: work.end], [place for place in places if work.start < place <= work.end])

    def disturb(self) -> None:
        what = self.choose.choice(("nothing", "nothing", "forget", "settle", "restart"))
        self.events[what] += 1
        if what == "forget":
            self.engine.cache.clear()
        elif what == "settle":
            self.engine.settle()
        elif what == "restart":
            self.engine.close()
            self.open()


def _cold(model: Model, path: list[int], chunk: int = 1 << 20) -> torch.Tensor:
    """Logits after each token, [T, V]. chunk: tokens computed at a time."""
    with torch.inference_mode():
        return prefill_logits(model, path, chunk, shuffled=False)


def _fault(answer: Answer, logits: torch.Tensor) -> str:
    """Where an answer is not what these logits, of its whole path, make likeliest; "" if it is."""
    rows = logits[-len(answer.tokens) :]
    for at, (token, row) in enumerate(zip(answer.tokens, rows, strict=True)):
        if float(row.max() - row[token]) > TIE:
            return f"token {at} is {token}, cold {int(row.argmax())}"
        if abs(float(row.log_softmax(-1)[token]) - answer.logprobs[at].logprob) > NEAR:
            return f"the probability of token {at} differs"
    return ""


def _config(choose: random.Random, loaded: Loaded, cache_dir: Path, ample: bool) -> EngineConfig:
    layout = loaded.model.cache_layout
    slot, least = small_models.slot_bytes(layout), small_models.least_bytes(layout)
    if ample:
        budgets, pages = Budgets(200 * slot, 64 * least, 0), 4096
    else:
        budgets = Budgets(
            choose.randint(1, 9) * slot, choose.choice((0, 1, 2, 8)) * least, choose.choice((0, 1, 3, 16)) * least
        )
        pages = choose.choice((0, 20, 300))
    return EngineConfig(
        str(loaded.folder),
        dtype=layout.dtype,
        device="cpu",
        context=CONTEXT,
        kv_tokens=CONTEXT + pages * 16,
        max_running_requests=choose.choice((1, 2, 4)),
        prefill_chunk=choose.choice((64, 256, 2048)),
        step_seconds=60,
        cache_device=budgets.device,
        cache_host=budgets.host,
        cache_disk=budgets.disk,
        cache_dir=str(cache_dir),
    )


def tell(load: Load, kind: str, seeds: range, quick_path: Path) -> Counter[str]:
    events: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in seeds:
        story = Story(seed, load(kind, "float32"), quick_path / str(seed), ample=seed % 4 == 0)
        story.run()
        events += story.events
        wrong += story.wrong
    print(kind, len(seeds), "sequences:", dict(events))
    assert wrong == []
    assert events["tie"] <= max(1, MOST_TIES * TURNS * len(seeds))
    return events


@pytest.mark.parametrize("kind", KINDS)
def test_edited_conversations_are_as_if_cold(load: Load, kind: str, quick_path: Path) -> None:
    tell(load, kind, range(6), quick_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hundred", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_edited_conversations_are_as_if_cold(
    load: Load, kind: str, hundred: int, quick_path: Path
) -> None:
    events = tell(load, kind, range(100 * hundred, 100 * hundred + 100), quick_path)
    assert {edit.__name__ for edit in EDITS} | {"forget", "restart", "prefill", "decode", "beside"} <= set(events)
    assert {"from device", "from host", "from disk"} <= set(events)


def compare_in_bfloat16(load: Load, kind: str, seeds: range, quick_path: Path) -> None:
    """Over whole sequences of edits, with the same tokens generated warm, cold and in float32."""
    loaded, exact = load(kind, "bfloat16"), load(kind, "float32").model
    warm_error = cold_error = 0.0
    for seed in seeds:
        choose = random.Random(seed)
        model = ForcedModel(
            loaded.model, lambda request: [token % VOCABULARY for token in request.prompt[:6]], keep_logits=True
        )
        engine = PromptEngine(model, _config(choose, loaded, quick_path / str(seed), ample=seed % 2 == 0))
        talk = Talk("a", choose, VOCABULARY, (40, 400))
        talk.begin(talk.system(700))
        for _ in range(TURNS):
            prompt, boundaries = talk.prompt()
            answer = engine.one(prompt, boundaries, 6, session="a")
            path = prompt + answer.tokens[:-1]
            reference, cold = _cold(exact, path), _cold(loaded.model, path)
            for length, logits in model.work[-1].logits.items():
                warm_error += float((logits - reference[length - 1]).double().square().sum())
                cold_error += float((cold[length - 1] - reference[length - 1]).double().square().sum())
            talk.answered(answer.tokens)
            choose.choice(EDITS)(talk)
        engine.close()
    ratio = (warm_error / cold_error) ** 0.5
    print(f"{kind}: root of the mean square error {ratio:.3f} times that of the cold run")
    assert ratio <= 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_near_to_float32_as_a_cold_run(load: Load, kind: str, quick_path: Path) -> None:
    compare_in_bfloat16(load, kind, range(2), quick_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_over_many_sequences(load: Load, kind: str, quick_path: Path) -> None:
    compare_in_bfloat16(load, kind, range(60), quick_path)
