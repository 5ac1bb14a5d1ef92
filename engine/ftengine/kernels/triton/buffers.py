"""What the GPU's kernels hand to each other: preallocated device tensors of fixed shape, counts on the device.

B = rows of a decode step, K = experts a token, U = B * K, E = experts a layer, L = MoE layers, numbered 0..L-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.formats.format import aligned

DECODE_TOKENS = 16  # rows that decode kernels take; more go the way of prefill
LINE = 64  # bytes of a cache line: what the GPU and the CPU write lies on different ones


@dataclass(frozen=True)
class Chosen:
    """The distinct experts that the GPU computes in a layer, and with what weight for which token.

    combine[u, t] is 0 where token t does not use expert u; rows u >= count are never read. Where experts are fetched,
    `turn` lists the rows so that those come first whose experts lay in slots before: they wait for no copy.
    """

    count: torch.Tensor  # int32 [1]
    slot: torch.Tensor  # int32 [U]
    combine: torch.Tensor  # float32 [U, B]
    ready: torch.Tensor  # int32 [1]: how many lay in slots before
    turn: torch.Tensor  # int32 [U]: rows

    @staticmethod
    def allocate(tokens: int, top_k: int, device: torch.device | str) -> Chosen:
        routes = tokens * top_k
        return Chosen(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(routes, dtype=torch.int32, device=device),
            torch.zeros(routes, tokens, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(routes, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class FetchList:
    """Experts of one layer whose blocks are copied from host memory into slots before they are computed."""

    count: torch.Tensor  # int32 [1]
    expert: torch.Tensor  # int32 [U]
    slot: torch.Tensor  # int32 [U]

    @staticmethod
    def allocate(routes: int, device: torch.device | str) -> FetchList:
        return FetchList(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (1, routes, routes)))


@dataclass(frozen=True)
class RouteBuffers:
    """Where `route` writes a layer's decisions. One set serves all layers of a step, one after the other."""

    ids: torch.Tensor  # int32 [B, K], most probable first
    weights: torch.Tensor  # float32 [B, K]
    gates: torch.Tensor  # float32 [B], of the shared expert; 1 where it has none
    chosen: Chosen
    fetch: FetchList

    @staticmethod
    def allocate(tokens: int, top_k: int, device: torch.device | str) -> RouteBuffers:
        routes = tokens * top_k
        return RouteBuffers(
            torch.zeros(tokens, top_k, dtype=torch.int32, device=device),
            torch.zeros(tokens, top_k, dtype=torch.float32, device=device),
            torch.ones(tokens, dtype=torch.float32, device=device),
            Chosen.allocate(tokens, top_k, device),
            FetchList.allocate(routes, device),
        )


@dataclass(frozen=True)
class Mailbox:
    """Host memory, mapped and pinned where there is a GPU, through which a layer's routes go to the CPU and back.

    The GPU writes ids, weights and rows, then bell[0] = n, the number of the request (1, 2, ...), with system-wide
    release order. The CPU writes `out`, zeros where it adds nothing, then reply[0] = n. One request is under way at a
    time. error[0] is not 0 once one of them has waited in vain; error[1] grows by one a second while the CPU's process
    runs, and the GPU gives up by that.
    """

    bell: torch.Tensor  # int32 [16]: number of the request, MoE layer, tokens, experts a token
    ids: torch.Tensor  # int32 [B, K], negative: not for the CPU
    weights: torch.Tensor  # float32 [B, K]
    rows: torch.Tensor  # [B, H] activations
    reply: torch.Tensor  # int32 [16]: number of the request that is done
    out: torch.Tensor  # float32 [B, H]
    error: torch.Tensor  # int32 [16]

    @staticmethod
    def carve(buffer: torch.Tensor, tokens: int, top_k: int, hidden: int, dtype: torch.dtype) -> Mailbox:
        """Views into a zeroed uint8 buffer of at least `Mailbox.size(...)` bytes, its start aligned to LINE."""
        at = 0

        def part(kind: torch.dtype, *shape: int) -> torch.Tensor:
            nonlocal at
            size = kind.itemsize * torch.Size(shape).numel()
            view = buffer[at : at + size].view(kind).view(shape)
            at = aligned(at + size, 2 * LINE)
            return view

        bell = part(torch.int32, 16)
        ids, weights = part(torch.int32, tokens, top_k), part(torch.float32, tokens, top_k)
        rows = part(dtype, tokens, hidden)
        reply = part(torch.int32, 16)
        return Mailbox(bell, ids, weights, rows, reply, part(torch.float32, tokens, hidden), part(torch.int32, 16))

    @staticmethod
    def size(tokens: int, top_k: int, hidden: int, dtype: torch.dtype) -> int:
        """Bytes."""
        sizes = (
            64,
            4 * tokens * top_k,
            4 * tokens * top_k,
            dtype.itemsize * tokens * hidden,
            64,
            4 * tokens * hidden,
            64,
        )
        return sum(aligned(size, 2 * LINE) for size in sizes)


@dataclass(frozen=True)
class SlotTensors:
    """The device's cache of experts: `experts/slots.py` makes and explains it, the kernels of `route.py` change it.

    G = slots that hold a block for one layer only, S = slots that hold it from step to step. The columns of `state`,
    `control`, `counters`, `admit`, `prefetch` and `record` are named in cache_state.py.
    """

    blocks: torch.Tensor  # uint8 [S + G, slot_bytes]
    slots: int  # S
    staging: int  # G
    ahead: int  # the last ones of those: in decode, for prefetched experts that no slot is given up for
    table: torch.Tensor  # int32 [L, E]: the slot that holds an expert, or -1
    keys: torch.Tensor  # int32 [S]: layer * E + expert, or -1
    stamp: torch.Tensor  # int32 [S]: the last step that used a slot
    score: torch.Tensor  # float32 [L, E]: what an expert is worth keeping
    queue: torch.Tensor  # int32 [S]: slots by rising score at the end of the last step, the next victims
    queue_score: torch.Tensor  # float32 [S]: their scores
    admit: torch.Tensor  # int32 [L, ...]: what is copied in the background
    prefetch: torch.Tensor  # int32 [L, ...]: what is copied before its layer begins
    control: torch.Tensor  # float32 [16]: settings the host may change between steps
    counters: torch.Tensor  # int64 [L, 16]
    state: torch.Tensor  # int32 [16]: step number, request number, head of the queue, ...
    row_scratch: torch.Tensor  # float32 [DECODE_TOKENS, E]: what rows tell each other within `route`
    split: torch.Tensor  # int16 [TABLES, DECODE_TOKENS, M]: how many missing experts are fetched; see split.py
    record: torch.Tensor  # int32 [RECORDED, L, RECORD]: how long layers took
    policy: int  # the rule of the scores
    resident: bool  # every expert is in slot layer * E + expert
    readable: bool  # the GPU can read the experts in host memory
    trace: TraceRing | None = None


@dataclass(frozen=True)
class TraceRing:
    """What the router said for a step's first row, for the last N recorded steps."""

    ids: torch.Tensor  # int16 [N, L, K]
    logits: torch.Tensor  # float16 [N, L, E]
