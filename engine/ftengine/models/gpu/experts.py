"""Routed experts in a step: slots on the GPU, blocks that cross the link, and the CPU's lane."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch

from ftengine.errors import FtError
from ftengine.experts import mailbox as mailboxes
from ftengine.experts.counts import CacheStats
from ftengine.experts.lane import Lane
from ftengine.experts.online import OnlineSplit, asked_for
from ftengine.experts.pinned import verify_copied
from ftengine.experts.pool import ExpertBank
from ftengine.experts.rest import MOST_ROWS, LaneRest
from ftengine.experts.slots import DEFAULT_COSTS, SlotPool
from ftengine.kernels.triton import prefetch
from ftengine.kernels.triton.buffers import Mailbox, RouteBuffers
from ftengine.kernels.triton.experts import experts_decode
from ftengine.kernels.triton.fetch import admit, fetch
from ftengine.kernels.triton.gated_swiglu import gated_swiglu_act
from ftengine.kernels.triton.grouped import experts_grouped
from ftengine.kernels.triton.join import join
from ftengine.kernels.triton.linear import linear
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.route_order import order_routes
from ftengine.kernels.triton.stage import route_prefill, seed, slots_for_round, stage
from ftengine.kernels.triton.victims import end_step
from ftengine.models.gpu.copies import Turns
from ftengine.models.gpu.next_routers import next_routers
from ftengine.models.gpu.setup import GpuSetup
from ftengine.models.gpu.strategy import Strategy
from ftengine.models.gpu.weights import DeviceMoe, DeviceWeights
from ftengine.models.gpu.workspace import DecodeBuffers

Waiting = Literal["gate_up", "down", "join"]

# Until it is known what the link has room for, so many experts a layer, none over a link that takes longer for one than
# so many layers: of 58 us, in the shape of Qwen3.6-35B-A3B on an H200
FIRST_PREFETCH, LONGEST_PREFETCH, LAYER_US = 4, 2.0, 58.0
# of the missing experts; None: by the lanes' costs
CPU_SHARE: dict[Strategy, float | None] = {"resident": 0.0, "offload": 0.0, "cpu": 1.0, "hybrid": None}


class GpuExperts:
    """Fulfils decode_step.DecodeExperts. banks: by MoE layer, in host memory; read by GPU and CPU until `close`.

    asking: whether what is launched now may ask the CPU; of `hybrid`, steps that leave its lane alone can be launched,
    too, and go on with the same slots.
    """

    def __init__(self, weights: DeviceWeights, banks: Mapping[int, ExpertBank], setup: GpuSetup) -> None:
        moes, device = weights.moes, weights.device
        self._banks = banks
        self._device = device
        self.mailbox: Mailbox | None = None
        self.lane: Lane | None = None
        self.pool: SlotPool | None = None
        self.split: OnlineSplit | None = None
        self._background = _stream(device)
        self._shared = _stream(device) if setup.branches else None
        self._early = setup.readable and setup.strategy != "resident"  # there is a `fetch` to overtake
        self._resident = setup.strategy == "resident"
        self.asking = False
        self.rest: LaneRest | None = None
        able = setup.readable and setup.slots > 0 and setup.prefetch > 0 and setup.strategy != "resident"
        self._next_routers = next_routers(moes) if able else {}
        self._foretold_layers = {index + 1 for index in self._next_routers}  # MoE layers whose experts are prefetched
        self._prefetching = bool(self._foretold_layers)
        self._foresight, self._copying = (_stream(device) if self._prefetching else None for _ in range(2))
        self._chosen = torch.cuda.Event() if self._foresight is not None else None  # type: ignore[no-untyped-call]
        self._copies = Turns(device)
        if not moes:
            return
        top_k, resident = moes[0].top_k, setup.strategy == "resident"
        self.pool = SlotPool(
            banks,
            setup.slots,
            setup.staging,
            top_k,
            device,
            policy=setup.policy,
            resident=resident,
            readable=setup.readable,
            trace_steps=setup.trace_steps,
            ahead=_ahead(setup, top_k, banks[0].experts) if self._prefetching else 0,
            costs=setup.costs or DEFAULT_COSTS,
        )
        self.pool.set_cpu_share(CPU_SHARE[setup.strategy])
        self.pool.set_prefetch(_first_prefetch(setup) if self._prefetching else 0)
        if resident:
            for index, bank in banks.items():
                self._load(index, bank)
        if setup.uses_cpu:
            self.mailbox = mailboxes.allocate(setup.decode_tokens, top_k, weights.hidden, weights.dtype, device)
            self.lane = Lane([banks[index] for index in range(len(banks))], self.mailbox, setup.threads)
            self.asking = True
        if setup.strategy == "hybrid" and setup.readable and self.lane is not None:
            self.split = self._split_by(asked_for(), self.pool, self.lane, setup.prefetch)
            if self.split is not None and setup.rest != "never" and _link_suffices(setup, self.pool):
                self.rest = LaneRest(setup.rest == "at first")
        self._prefetched_alone = _first_prefetch(setup) if self._prefetching else 0
        self._prefetched_asking = self.pool.prefetch
        self._routes = {rows: RouteBuffers.allocate(rows, top_k, device) for rows in range(1, setup.decode_tokens + 1)}
        widest = max(layer.layout.intermediate for layer in moes)
        rows = setup.decode_tokens
        self._shared_out = torch.zeros(rows, weights.hidden, device=device)
        self._foretold = torch.zeros(rows, self.pool.experts if self._prefetching else 0, device=device)
        self._scratch = torch.empty(rows * top_k * rows * widest, dtype=weights.dtype, device=device)

    def decode(self, layer: DeviceMoe, buffers: DecodeBuffers) -> None:
        """buffers.residual += the layer's output for it. Launches only."""
        assert self.pool is not None
        pool, residual, hidden = self.pool.tensors, buffers.residual, buffers.normalized
        rows, index, bank = len(residual), layer.index, self._banks[layer.index]
        projected, routes = buffers.projected(layer.projection.rows), self._routes[rows]
        linear(
            layer.projection.parts,
            residual,
            projected,
            norm=(layer.norm.weight, layer.norm.epsilon),
            act=hidden.dtype,
            normalized=hidden,
        )
        self._foretell(layer, hidden)
        mailbox, shared = self.mailbox if self.asking else None, None
        if layer.shared_down is not None:
            shared = residual if mailbox is None else self._shared_out[:rows]  # which `join` adds
            with self._beside(self._shared):
                _shared_expert(layer, projected, buffers, shared)
        if self.asking and self.lane is not None:  # it may have fallen asleep for good while kernels were compiled
            self.lane.wake()
        route(
            pool,
            index,
            projected[:, : layer.router_rows],
            hidden,
            layer.top_k,
            layer.normalize,
            routes,
            mailbox,
            prefetched=index in self._foretold_layers,
        )
        self._prefetch(layer, rows)
        fetch(pool, index, bank, routes)
        self._admit(index, bank)
        self._join_shared(layer, "gate_up")
        scratch = self._scratch[: rows * layer.top_k * rows * layer.layout.intermediate]
        experts_decode(
            layer.layout,
            pool.blocks,
            routes.chosen,
            hidden,
            scratch.view(rows * layer.top_k, rows, layer.layout.intermediate),
            residual,
            early=self._early,
            before_adding=lambda: self._join_shared(layer, "down"),
        )
        self._join_shared(layer, "join")
        if mailbox is not None:
            join(pool, index, mailbox, residual, shared)

    def prefill(self, layer: DeviceMoe, hidden: torch.Tensor, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See prefill.PrefillExperts. One round's blocks cross the link while the round before is computed."""
        assert self.pool is not None
        if self.rest is not None:
            self.rest.interrupt()
        pool, bank = self.pool.tensors, self._banks[layer.index]
        routes = route_prefill(pool, layer.index, logits, layer.top_k, layer.normalize)
        self._copies.follow()
        for number in range(routes.rounds):
            # Rounds take turns in two halves of the staging slots: the one before last is done with this half.
            with self._copies.turn(number):
                stage(pool, bank, routes, number)
            order = order_routes(slots_for_round(routes, number))
            experts_grouped(layer.layout, pool.blocks, order, hidden, routes.weights, out)
            seed(pool, layer.index, routes, number)
            self._copies.done(number)
        return routes.gates

    def end_layers(self) -> None:
        """The cache is brought up to date while the head is computed."""
        if self.pool is not None:
            with self._beside(self._background):
                end_step(self.pool.tensors)

    def end_step(self) -> None:
        """The step ends when the background's work has."""
        self._join(self._background)
        self._join(self._foresight)
        self._join(self._copying)

    def stats(self) -> CacheStats | None:
        """What was counted so far; waits for the device. None for a model without routed experts."""
        return None if self.pool is None else self.pool.stats()

    def forms(self, rows: int) -> tuple[bool, ...]:
        """What `asking` may be in steps of so many rows."""
        both = self.rest is not None and rows <= MOST_ROWS
        return (True, False) if both else (self.mailbox is not None,)

    def wake(self, rows: int = 0) -> None:
        """Before a decode step of so many rows is launched; 0: in the form that the last one had."""
        if rows and self.rest is not None:
            self._ask(not self.rest.step(rows))
        if not self.asking:
            return
        if self.lane is not None:
            self.lane.wake()
        if self.split is not None:
            self.split.step()

    def _ask(self, asking: bool) -> None:
        """What the link has room for is another number in either form."""
        if asking == self.asking or self.pool is None:
            return
        if not asking:
            self._prefetched_asking = self.pool.prefetch
        self.pool.set_prefetch(self._prefetched_asking if asking else self._prefetched_alone)
        self.asking = asking

    def check(self) -> None:
        """After a step. Raises FtError if the two lanes lost each other; the cache and the mailbox are then useless."""
        wrong = None if self.mailbox is None else mailboxes.error_of(self.mailbox)
        if wrong is not None:
            raise FtError(wrong, "ft serve --moe-backend offload")

    def close(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:  # of a GPU that is lost, too
            if self.lane is not None:
                self.lane.close()

    def _split_by(self, asked: float | bool, pool: SlotPool, lane: Lane, prefetch: int) -> OnlineSplit | None:
        """asked: see online.asked_for. prefetch: experts a layer, at most."""
        if asked is True:
            return OnlineSplit(pool, lane, most_prefetched=prefetch if self._prefetching else 0)
        if asked is not False:
            pool.set_cpu_share(asked)
        return None

    def _load(self, index: int, bank: ExpertBank) -> None:
        """An expert in every slot, for good: a copy that did not arrive would be wrong tokens. Raises FtError."""
        assert self.pool is not None
        self.pool.load_layer(index, bank)
        first = index * self.pool.experts
        if wrong := verify_copied(bank, self.pool.tensors.blocks[first : first + self.pool.experts]):
            raise FtError(f"{wrong}, in MoE layer {index}", "ft serve --device cpu")

    def _foretell(self, layer: DeviceMoe, hidden: torch.Tensor) -> None:
        """What the next layer's router is expected to say, beside what follows."""
        if (router := self._next_routers.get(layer.index)) is not None:
            with self._beside(self._foresight):
                linear((router,), hidden, self._foretold[: len(hidden)], act=hidden.dtype)

    def _prefetch(self, layer: DeviceMoe, rows: int) -> None:
        index = layer.index + 1
        if index in self._foretold_layers:
            assert self.pool is not None
            pool = self.pool.tensors
            with self._beside(self._foresight):
                prefetch.choose(pool, index, self._foretold[:rows], layer.top_k)
                if self._chosen is not None:
                    self._chosen.record()
                with self._beside(self._copying):
                    prefetch.copy(pool, index, self._banks[index])

    @property
    def _waiting(self) -> Waiting:
        return _waits_for_shared(self.asking, self._resident)

    def _join_choice(self, layer: DeviceMoe, kernel: Waiting) -> None:
        """Before the next layer looks its experts up."""
        if kernel == self._waiting and layer.index + 1 in self._foretold_layers and self._chosen is not None:
            torch.cuda.current_stream().wait_event(self._chosen)

    def _admit(self, index: int, bank: ExpertBank) -> None:
        if self.asking and self.pool is not None:
            with self._beside(self._background):
                admit(self.pool.tensors, index, bank)

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """On that stream, after what was launched so far; in program order where there is none."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _join_shared(self, layer: DeviceMoe, kernel: Waiting) -> None:
        self._join_choice(layer, kernel)
        if layer.shared_down is not None and kernel == self._waiting:
            self._join(self._shared)

    def _join(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)


def _waits_for_shared(asking: bool, resident: bool) -> Waiting:
    """Which kernel of a layer waits for the shared expert's stream: one that waits for two others cannot start early.

    `join` waits for the CPU in any case. With a quarter of the experts in slots on an H200, a step of 1 and 4 tokens
    takes 3.95 and 8.68 ms so, 4.13 and 8.94 where `gate_up` waits, and 3.99 and 8.94 if that does not start early.
    Without a CPU lane the sum is complete after `down`, so that one waits; where all is resident, `gate_up` does, which
    has no copies to overtake.
    """
    if asking:
        return "join"
    return "gate_up" if resident else "down"


def _link_suffices(setup: GpuSetup, pool: SlotPool) -> bool:
    """Whether all experts that a step misses find a place on the GPU. Without slots, nothing is ever found there."""
    needed = min(setup.decode_tokens * pool.top_k, pool.experts)
    return setup.slots > 0 and pool.tensors.staging - pool.tensors.ahead >= needed


def _ahead(setup: GpuSetup, top_k: int, experts: int) -> int:
    """Staging slots for prefetched experts, an even number; decode needs the others for those that are fetched."""
    needed = min(setup.decode_tokens * top_k, experts)
    if setup.uses_cpu:  # it takes what finds no place
        needed = min(needed, setup.staging // 2)
    return max(0, min(2 * setup.prefetch, setup.staging - needed)) // 2 * 2


def _first_prefetch(setup: GpuSetup) -> int:
    costs = setup.costs or DEFAULT_COSTS
    return min(setup.prefetch, FIRST_PREFETCH) if costs.b_link <= LONGEST_PREFETCH * LAYER_US else 0


def _shared_expert(layer: DeviceMoe, projected: torch.Tensor, buffers: DecodeBuffers, out: torch.Tensor) -> None:
    """Its output goes to `out`, or is added to it if that is the residual: nobody else may write there meanwhile."""
    assert layer.shared_down is not None
    gates = projected[:, layer.experts] if layer.gated else None
    mixed = buffers.mixed(layer.shared_down.columns)
    gated_swiglu_act(projected[:, layer.router_rows :], gates, mixed)
    linear((layer.shared_down,), mixed, out, act=mixed.dtype, add=out is buffers.residual)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
