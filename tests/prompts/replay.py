"""Sends a recording's requests again, answers them as they were answered, and counts what had to be computed."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy

from ftengine.core import CacheLayout, Request
from ftengine.dialect import Dialect
from tests.prompts.forced import ForcedModel, Work
from tests.prompts.house import House
from tests.support.exchanges import Exchange, Turn, turn_of, with_ids
from tests.support.streams import parse_sse
from tests.support.written import tokens_of, written

NOT_REPLAYED = {"host", "connection", "content-length", "accept-encoding"}  # they belong to the connection
SPACING = 512  # tokens


@dataclass(frozen=True)
class Step:
    """One request's way through the server. changed, by the oracle: the first token that nothing before had."""

    exchange: Exchange
    kind: str  # first, side, same, loop, other
    work: Work
    changed: int
    previous: int  # tokens of the prompt before in the same conversation; 0: there is none
    cached: int  # tokens reused as its API reports them
    reported: int  # tokens of the prompt as its API reports them
    told: dict[str, Any]  # of /v1/stats, the last of engine.prompts.latest

    @property
    def length(self) -> int:
        return len(self.work.request.prompt)

    @property
    def reused(self) -> int:
        return self.length - self.work.prompt

    @property
    def allowed(self) -> float:
        """Tokens that may be computed: the same prompt again costs one token's work."""
        return 1 if self.kind == "same" else 1.02 * (self.length - self.changed) + SPACING


class Known:
    """The oracle: every path of tokens computed so far, as plain lists, and places on it that one may go on from."""

    def __init__(self) -> None:
        self._paths: list[tuple[numpy.ndarray, list[int]]] = []

    def add(self, path: list[int], places: Iterable[int] = ()) -> None:
        self._paths.append((numpy.array(path, dtype=numpy.int32), sorted(places)))

    def reach(self, prompt: list[int]) -> tuple[int, int]:
        """The first token of `prompt` that no path has, and the last place up to there. The last token of a prompt is
        always computed."""
        tokens = numpy.array(prompt, dtype=numpy.int32)
        changed = told = 0
        for path, places in self._paths:
            same = min(common(path, tokens), len(tokens) - 1)
            changed = max(changed, same)
            told = max(told, *places[: bisect.bisect_right(places, same)], 0)
        return changed, told

    def changed(self, prompt: list[int]) -> int:
        return self.reach(prompt)[0]


def common(one: numpy.ndarray, other: numpy.ndarray) -> int:
    """Tokens at the start that are the same."""
    shorter = min(len(one), len(other))
    different = numpy.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter


class Script:
    """What the forced model says next, put into its mouth by whoever sends the request."""

    def __init__(self, dialect: Dialect, layout: CacheLayout) -> None:
        """layout: of the model, in the dtype that it is served in."""
        self._dialect = dialect
        self.layout = layout
        self._think = dialect.encode("<think>")[-1]
        self.turn = Turn()
        self.model: ForcedModel | None = None

    def answer(self, request: Request) -> list[int]:
        in_reasoning = self._think in request.prompt[-2:]  # with the line break after it
        return tokens_of(written(self.turn, in_reasoning=in_reasoning), self._dialect.encode)


class Replay:
    """A client's session: sends requests one after the other. known: what its server computed for others, too."""

    def __init__(self, house: House, script: Script, known: Known | None = None) -> None:
        self.steps: list[Step] = []
        self.house = house
        self._script = script
        self._known = known or Known()
        self._ids: dict[str, str] = {}  # of calls: recorded to given

    async def send(self, exchange: Exchange) -> Step:
        model = self._script.model
        assert model is not None
        before = len(model.work)
        self._script.turn = turn = exchange.turn or Turn("Yes.")
        events = await self._post(exchange)
        (work,) = model.work[before:]
        given = turn_of(exchange.route, events).calls
        self._ids.update({call.id: answer.id for call, answer in zip(turn.calls, given, strict=False)})
        changed = self._known.changed(work.request.prompt)
        told = (await self.house.stats())["engine"]["prompts"]["latest"][-1]
        step = _step(exchange, self.steps, work, changed, usage_of(exchange.route, events), told)
        self.steps.append(step)
        self._known.add(work.path)
        return step

    async def _post(self, exchange: Exchange) -> list[tuple[str, Any]]:
        headers = {name: value for name, value in exchange.headers.items() if name.lower() not in NOT_REPLAYED}
        body = with_ids({**exchange.body, "stream": True}, self._ids)
        response = await self.house.client.post(exchange.path, headers=headers, json=body)
        assert response.status_code == 200, f"{exchange.name}: {response.status_code} {response.text[:300]}"
        return parse_sse(response.text)


async def replay(house: House, script: Script, exchanges: list[Exchange]) -> list[Step]:
    session = Replay(house, script)
    return [await session.send(exchange) for exchange in exchanges]


def _step(
    exchange: Exchange, steps: list[Step], work: Work, changed: int, usage: tuple[int, int], told: dict[str, Any]
) -> Step:
    main = [step for step in steps if not step.exchange.side]
    last = main[-1] if main else None
    kind = "other"
    if any(step.work.request.prompt == work.request.prompt for step in steps):
        kind = "same"
    elif exchange.side:
        kind = "side"
    elif last is None:
        kind = "first"
    elif last.exchange.turn is not None and last.exchange.turn.calls and exchange.length > last.exchange.length:
        kind = "loop"
    previous = 0 if last is None or exchange.side else last.length
    return Step(exchange, kind, work, changed, previous, *usage, told)


def usage_of(route: str, events: list[tuple[str, Any]]) -> tuple[int, int]:
    """Tokens of the prompt that were reused, and all of them, as the API's own fields say."""
    if route == "/v1/messages":
        usages = [data["message"]["usage"] for name, data in events if name == "message_start"]
        usages += [data["usage"] for name, data in events if name == "message_delta"]
        merged = {key: value for usage in usages for key, value in usage.items() if value is not None}
        cached = merged.get("cache_read_input_tokens", 0)
        return cached, merged["input_tokens"] + cached + merged.get("cache_creation_input_tokens", 0)
    if route == "/v1/responses":
        usage = next(data["response"]["usage"] for name, data in events if name == "response.completed")
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    usages = [data["usage"] for _, data in events if isinstance(data, dict) and data.get("usage")]
    if not usages:  # asked for by the client, or not told
        return -1, -1
    return (usages[-1].get("prompt_tokens_details") or {}).get("cached_tokens", 0), usages[-1]["prompt_tokens"]
