"""Divides the GPU's memory before anything is loaded, each part with its reason; refuses with numbers. Torch-free.

In this order: dense weights, workspace, recurrent states of running sequences, keys and values of one context, anchors,
which prompts go on from, and slots for routed experts with the rest, beside what foretells which of them a layer will
need. When all experts fit, what is then left holds more keys and values. Nothing here measures: sizes come from headers
(memory/estimate.py), the free memory from the driver (memory/gpu.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory import estimate
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.plan import DEFAULT_RUNNING, SMALLEST_CONTEXT, check_context
from ftengine.memory.prompts import plan_anchors, slot_bytes, slots_running, staging_bytes
from ftengine.memory.sizes import gigabytes

MEMORY_RATIO = 0.9  # the rest is left to the driver, to code that is loaded, and to what else draws on the screen
DEFAULT_CONTEXT = 32768  # tokens: an agent's session; each further one takes the place of experts
PREFILL_CHUNKS = (8192, 4096, 2048, 1024, 512)  # tokens a step; each expert crosses the link once a step
WORKSPACE_SHARE = 8  # at most 1/8 of what dense weights leave is for the activations of a prefill step by default
STATE_SHARE = 8  # at most 1/8 of what dense weights and workspace leave is for states of running sequences by default
ANCHOR_SHARE = 20  # 1/20 of what is then left is for anchors by default,
ANCHOR_FLOOR = 8  # and up to 1/8 where that is less than prefill wants
SPARE = 1  # slot and page that graphs write to while they are captured (cache/tensors.py)
DECODE_TOKENS = 16  # sequences of the largest decode step (kernels/triton/buffers.py)
PREFILL_STAGING = 32  # experts at the least; half of them cross the link while the other half is computed
MOST_STAGING = 128  # by default: a round's experts cross the link while those of the round before are computed
STAGING_SHARE = 8  # at most 1/8 of the memory for experts is staging by default


@dataclass(frozen=True)
class Demand:
    """What a model asks of a GPU. Bytes, unless said otherwise."""

    weights: WeightSizes
    workspace: int  # of decode steps, and what does not depend on how much is computed at once
    prefill: int  # workspace of one token of a prefill step
    token: int  # keys and values of one token, over all layers
    state: int  # one sequence's recurrent state; 0 without
    top_k: int  # experts a token
    max_context: int  # the checkpoint's limit, tokens

    @staticmethod
    def of(sizes: WeightSizes, text_config: Mapping[str, Any], dtype: str, max_context: int) -> Demand:
        """dtype: of activations, keys and values."""
        return Demand(
            weights=sizes,
            workspace=estimate.decode_workspace(text_config),
            prefill=estimate.prefill_bytes_per_token(text_config, dtype),
            token=estimate.kv_bytes_per_token(text_config, dtype),
            state=estimate.state_bytes(text_config),
            top_k=estimate.experts_per_token(text_config),
            max_context=max_context,
        )


@dataclass(frozen=True)
class DevicePlan:
    """What lies on the GPU. Bytes, unless said otherwise."""

    budget: Resolved[int]
    dense: int
    workspace: int
    prefill_chunk: Resolved[int]  # tokens
    context: Resolved[int]  # tokens
    max_running: Resolved[int]  # sequences
    kv_tokens: Resolved[int]  # a multiple of the page size
    state_slots: Resolved[int]  # of running sequences and anchors together
    cache_device: Resolved[int]  # bytes that the anchors among them may take
    slot: int  # bytes of one; there is one more than these, for what belongs to no sequence
    slots: Resolved[int]  # experts that stay from step to step
    staging: Resolved[int]  # experts that are there for one layer of one step only
    resident: bool  # every expert has its own slot, for good
    used: int  # all of it together
    next_routers: int = 0  # what is asked which experts to prefetch; only where there are slots, and not for all
    notes: tuple[str, ...] = ()  # what other settings would give

    def parts(self, demand: Demand) -> dict[str, int]:
        """Bytes by name, in the order in which they were given; their sum is `used`."""
        return {
            "dense weights": self.dense,
            "workspace": self.workspace,
            "states and anchors": (self.state_slots.value + SPARE) * self.slot,
            "keys and values": self.kv_tokens.value * demand.token,
            "next routers": self.next_routers,
            "expert slots": self.slots.value * demand.weights.block,
            "staging": self.staging.value * demand.weights.block,
        }


def plan_device(config: EngineConfig, demand: Demand, free: int) -> DevicePlan:
    """free: bytes of the GPU that nobody uses. Raises ConfigError if what was asked for, or the least, does not fit."""
    return _Planner(config, demand, free).plan()


def least_bytes(demand: Demand, config: EngineConfig) -> int:
    """What the smallest useful server takes: one sequence, its state, a small context, no expert in a slot."""
    slots = (slots_running(demand.state, 1) + SPARE) * slot_bytes(demand.token, demand.state, config.page_size)
    tokens = min(SMALLEST_CONTEXT, demand.max_context)
    workspace = demand.workspace + PREFILL_CHUNKS[-1] * demand.prefill + staging_bytes(config, demand.token)
    staging = _least_staging(demand, 1) * demand.weights.block
    return demand.weights.dense + workspace + slots + tokens * demand.token + staging


def budget(config: EngineConfig, free: int) -> Resolved[int]:
    ratio = MEMORY_RATIO if config.memory_ratio is None else config.memory_ratio
    origin = "default" if config.memory_ratio is None else "asked for"
    return Resolved(int(free * ratio), f"{ratio:g} ({origin}) of {gigabytes(free)} free")


class _Planner:
    """One plan being made: `left` goes down from the budget as parts are taken."""

    def __init__(self, config: EngineConfig, demand: Demand, free: int) -> None:
        self.config = config
        self.demand = demand
        self.slot = slot_bytes(demand.token, demand.state, config.page_size)
        self.budget = budget(config, free)
        self.left = self.budget.value
        self.taken: list[tuple[str, int]] = []

    def plan(self) -> DevicePlan:
        demand, config = self.demand, self.config
        check_context(config, demand.max_context)
        self._take("dense weights", demand.weights.dense, "ft serve --device cpu")
        chunk = self._prefill_chunk()
        workspace = demand.workspace + chunk.value * demand.prefill + staging_bytes(config, demand.token)
        self._take(f"workspace for steps of {chunk.value} tokens", workspace, "ft serve --max-prefill-length 512")
        running = self._running()
        taken = slots_running(demand.state, running.value)
        self._take(f"states of {running.value} sequences", (taken + SPARE) * self.slot, FEWER)
        context = self._context()
        kv_tokens = self._kv_tokens(context.value)
        smaller = self._smaller()
        self._take(f"keys and values of {kv_tokens.value} tokens", kv_tokens.value * demand.token, smaller)
        anchors = self._anchors(running.value)
        self._take(f"{anchors.value} anchors", anchors.value * self.slot, "ft serve --cache-device 0")
        slots, staging = self._experts(running.value, smaller)
        everything = slots.value == demand.weights.total
        next_routers = self._next_routers(slots.value, staging.value)
        self.left -= next_routers + (slots.value + staging.value) * demand.weights.block
        if everything:
            kv_tokens = self._more_kv_tokens(kv_tokens, context.value, running.value)
        why = f"{taken} running, {anchors.value} anchors ({anchors.reason})"
        return DevicePlan(
            budget=self.budget,
            dense=demand.weights.dense,
            workspace=workspace,
            prefill_chunk=chunk,
            context=context,
            max_running=running,
            kv_tokens=kv_tokens,
            state_slots=Resolved(taken + anchors.value, why),
            cache_device=Resolved(self.config.cache_device or anchors.value * self.slot, anchors.reason),
            slot=self.slot,
            slots=slots,
            staging=staging,
            resident=everything and slots.value > 0 and not staging.value,
            used=self.budget.value - self.left,
            next_routers=next_routers,
            notes=tuple(self._notes(kv_tokens.value, slots.value)),
        )

    def _take(self, name: str, size: int, next_step: str) -> None:
        if size > self.left:
            before = ", ".join(f"{gigabytes(taken)} for {what}" for what, taken in self.taken if taken)
            raise ConfigError(
                f"{name} need {gigabytes(size)}, but of the GPU's memory {gigabytes(self.budget.value)} can be used "
                f"({self.budget.reason}), of which {gigabytes(self.left)} are left{before and f' after {before}'}",
                next_step,
            )
        self.left -= size
        self.taken.append((name, size))

    def _prefill_chunk(self) -> Resolved[int]:
        if self.config.prefill_chunk is not None:
            return Resolved(self.config.prefill_chunk, "asked for")
        share = self.left // WORKSPACE_SHARE
        for chunk in PREFILL_CHUNKS[:-1]:
            if chunk * self.demand.prefill <= share:
                break
        else:
            chunk = PREFILL_CHUNKS[-1]
        if chunk == PREFILL_CHUNKS[0]:
            return Resolved(chunk, "default")
        return Resolved(chunk, f"more would take over 1/{WORKSPACE_SHARE} of {gigabytes(self.left)}")

    def _running(self) -> Resolved[int]:
        if self.config.max_running_requests is not None:
            return Resolved(self.config.max_running_requests, "asked for")
        share, count = self.left // STATE_SHARE, DEFAULT_RUNNING
        while count > 1 and slots_running(self.demand.state, count) * self.slot > share:
            count //= 2
        if count == DEFAULT_RUNNING:
            return Resolved(count, "default")
        return Resolved(count, f"the states of more would take over 1/{STATE_SHARE} of {gigabytes(self.left)}")

    def _context(self) -> Resolved[int]:
        if self.config.context is not None:
            return Resolved(self.config.context, "asked for")
        choices = [Resolved(self.demand.max_context, "the checkpoint's limit"), Resolved(DEFAULT_CONTEXT, "default")]
        if self.config.kv_tokens is not None:
            choices.append(Resolved(self.config.kv_tokens, "as many as kv_tokens"))
        elif (affordable := self._affordable()) is not None:
            choices.append(Resolved(max(affordable, SMALLEST_CONTEXT), f"what {gigabytes(self.left)} allow"))
        return min(choices, key=lambda choice: choice.value)

    def _affordable(self) -> int | None:
        """Tokens whose keys and values fit beside the least that experts need; None for models that keep none."""
        if not self.demand.token:
            return None
        room = self.left - _least_staging(self.demand, 1) * self.demand.weights.block
        return max(0, room // self.demand.token // self.config.page_size * self.config.page_size)

    def _kv_tokens(self, context: int) -> Resolved[int]:
        if self.config.kv_tokens is not None:
            return Resolved(self._pages(self.config.kv_tokens), "asked for")
        return Resolved(self._pages(context), "one context, shared by the sequences")

    def _more_kv_tokens(self, least: Resolved[int], context: int, running: int) -> Resolved[int]:
        """With nothing else to put into the memory that is left: up to a whole context for each sequence."""
        token, size = self.demand.token, self.config.page_size
        if self.config.kv_tokens is not None or not token:
            return least
        wanted = self._pages(context * running)
        tokens = min(wanted, least.value + self.left // token // size * size)
        if tokens <= least.value:
            return least
        self.left -= (tokens - least.value) * token
        return Resolved(tokens, f"{running} contexts" if tokens == wanted else "what the experts leave")

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size) * self.config.page_size

    def _anchors(self, running: int) -> Resolved[int]:
        return plan_anchors(
            self.config,
            self.left - _least_staging(self.demand, running) * self.demand.weights.block,
            self.slot,
            state=self.demand.state,
            running=running,
            share=ANCHOR_SHARE,
            floor=ANCHOR_FLOOR,
        )

    def _experts(self, running: int, smaller: str) -> tuple[Resolved[int], Resolved[int]]:
        """Slots and staging. smaller: what helps if not even staging fits."""
        weights, backend = self.demand.weights, self.config.moe_backend
        if not weights.total:
            none = Resolved(0, "the model has no routed experts")
            return none, none
        asked = self._asked_slots()
        fit = self.left // weights.block
        all_asked = asked is None or asked.value >= weights.total
        if backend == "resident" and fit < weights.total:
            raise ConfigError(
                f"all {weights.total} experts need {gigabytes(weights.total * weights.block)}, "
                f"{gigabytes(self.left)} of the GPU's memory are left for them",
                "ft serve --moe-backend auto",
            )
        if backend in ("auto", "resident") and all_asked and fit >= weights.total:
            return Resolved(weights.total, "all fit"), Resolved(0, "every expert has its slot")
        staging = self._staging(asked, running, smaller)
        room = max(0, (self.left - weights.next_routers) // weights.block - staging.value)
        if backend == "cpu":
            return Resolved(0, "moe_backend cpu: the CPU computes them in decode"), staging
        if asked is None:
            return Resolved(min(room, weights.total), f"what {gigabytes(self.left)} leave beside staging"), staging
        if asked.value > room:
            raise ConfigError(
                f"{asked.value} expert slots need {gigabytes(asked.value * weights.block)}, "
                f"{gigabytes(room * weights.block)} of the GPU's memory are left for them beside "
                f"{gigabytes(staging.value * weights.block)} of staging",
                f"ft serve --moe-cache-size {room}",
            )
        return asked, staging

    def _next_routers(self, slots: int, staging: int) -> int:
        """Copies of experts before their layer begins need slots; where every expert has its own, nothing is copied."""
        return self.demand.weights.next_routers if slots and staging else 0

    def _asked_slots(self) -> Resolved[int] | None:
        config, weights = self.config, self.demand.weights
        if config.moe_cache_size is not None:
            count, said = config.moe_cache_size, f"{config.moe_cache_size} slots"
        elif config.moe_cache_rate is not None:
            count, said = round(config.moe_cache_rate * weights.total), f"{config.moe_cache_rate:g} of all"
        elif config.moe_cache_mem is not None:
            count, said = config.moe_cache_mem // weights.block, gigabytes(config.moe_cache_mem)
        else:
            return None
        return Resolved(min(count, weights.total), f"asked for: {said}")

    def _staging(self, asked: Resolved[int] | None, running: int, smaller: str) -> Resolved[int]:
        """Room for what a decode step may need at once; more makes prefill go through a layer in fewer rounds."""
        weights, least = self.demand.weights, _least_staging(self.demand, running)
        room = self.left // weights.block
        if least > room:
            raise ConfigError(
                f"{least} experts on their way through the GPU need {gigabytes(least * weights.block)}, "
                f"{gigabytes(max(0, self.left))} of its memory are left",
                smaller,
            )
        spare = room - (asked.value if asked is not None else 0)
        most = min(2 * weights.experts, MOST_STAGING)
        count = max(least, min(most, room // STAGING_SHARE, spare))
        return Resolved(count - count % 2, f"{least} at the least, {max(least, most)} at the most")

    def _smaller(self) -> str:
        """Before keys and values are taken: the command that asks for as many as fit."""
        affordable = self._affordable()
        if affordable is None or affordable < SMALLEST_CONTEXT:
            return "ft serve --device cpu"
        return f"ft serve --context {affordable}"

    def _notes(self, kv_tokens: int, slots: int) -> list[str]:
        weights, token = self.demand.weights, self.demand.token
        smaller = kv_tokens // 2
        gained = min(smaller * token // weights.block, weights.total - slots) if weights.block else 0
        if not gained or self.config.moe_backend == "cpu" or self._asked_slots() is not None:
            return []
        return [
            f"{slots} of {weights.total} experts ({slots / weights.total:.0%}) have a slot in the GPU's memory; "
            f"keys and values of {smaller} tokens in place of {kv_tokens} would make room for {gained} more"
        ]


FEWER = "ft serve --max-running-requests 1"


def _least_staging(demand: Demand, running: int) -> int:
    """Experts that one layer of a step of `running` sequences can need at once, and some for prefill; even, for there
    are two halves. A step of more than DECODE_TOKENS sequences is computed as prefill is, in rounds."""
    needed = min(demand.weights.experts, max(PREFILL_STAGING, demand.top_k * min(running, DECODE_TOKENS)))
    return needed + needed % 2
