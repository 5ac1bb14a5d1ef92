"""The nouns of the engine: Request, Sequence, Batch, and the tensors a model reads and writes.

Torch-free at run time: the front imports this module to build requests. It knows nothing of HTTP, text,
templates or scheduling policy. Each field says who sets it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch


class FinishReason(str, enum.Enum):
    """Why a sequence ended. `STOP`: an end-of-sequence or stop token id; `LENGTH`: max_tokens or the context."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is chosen. Set by the front from the request, validated there (ranges in docs/api.md).

    The engine applies, in this order: logit_bias, repetition, presence and frequency penalties, temperature,
    top_k, top_p, min_p. `temperature == 0` is greedy (the penalties and logit_bias still apply).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; n: the chosen token's and the n most likely ones'
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence ids


class BoundaryKind(str, enum.Enum):
    """Why a place in a path of tokens is worth going on from."""

    SYSTEM = "system"  # after tools and system text
    MESSAGE = "message"  # after a message
    LAST_USER = "last_user"  # before the last user message
    QUESTION_END = "question_end"  # after it; a template that drops reasoning departs here at the next one
    THINKING = "thinking"  # after reasoning
    CALL_START = "call_start"
    CALL_END = "call_end"
    RESULT_START = "result_start"  # of a tool's output
    RESULT_END = "result_end"
    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    SPACING = "spacing"  # inside a long block


class Boundary(msgspec.Struct, frozen=True, array_like=True):
    """position: tokens before it, 1..len(prompt)."""

    position: int
    kind: BoundaryKind


class Request(msgspec.Struct, frozen=True):
    """One generation asked of the engine. Set by the front; never changed after."""

    id: str
    prompt: list[int]  # token ids, at least one
    sampling: SamplingParams
    boundaries: list[Boundary] = []  # of the prompt, positions ascending; a position may have one only
    boundary_tokens: tuple[int, ...] = ()  # ids after which, while generating, a block begins or ends
    session: str = ""  # the client's own key, shortened by the front; "": not known
    side: bool = False  # a title, a compaction, a sub-agent: beside the session's main conversation


class Reused(msgspec.Struct, frozen=True):
    """What a request's prompt found in the caches, set by the cache at admission. Tokens."""

    tokens: int = 0  # not computed again
    tier: str = ""  # "device", "host" or "disk", of the deepest part; "": nothing was reused
    kind: BoundaryKind | None = None  # of the anchor used; None: any token would do, or none was found
    changed: int = 0  # the first token that differs from what the session, or else any path, had before


class SequenceStatus(str, enum.Enum):
    WAITING = "waiting"
    RESTORING = "restoring"  # its cached prefix is on its way from a lower tier
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A request while it lives in the engine. Created and changed by the scheduler only; models read it."""

    request: Request
    tokens: list[int]  # prompt, then generated ids; the sampler's choice is appended by the scheduler
    status: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0  # tokens whose keys and values (and recurrent state) are in the cache
    cached: int = 0  # of the prompt, how many came from the prefix cache at admission
    pages: list[int] = field(default_factory=list)  # page ids in token order, set by the cache
    state_slot: int = -1  # recurrent-state slot, -1 for models without one, set by the cache
    finish: FinishReason | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class StateSpec:
    """One recurrent tensor of a layer, without the slot dimension (Gated DeltaNet's S, or its conv window)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a torch dtype's name: "float32", "bfloat16"


@dataclass(frozen=True)
class CacheLayout:
    """What a model needs kept between steps. Set by the model at load; the cache allocates from it.

    kv_layers counts only layers with attention; a model numbers them 0..kv_layers-1 itself.
    states holds, per recurrent layer in the model's own order, its tensors.
    """

    kv_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    states: tuple[tuple[StateSpec, ...], ...] = ()


@dataclass
class CacheTensors:
    """The allocated cache, as the model sees it. Set by the cache at start; written by the model's forward.

    keys[l], values[l]: [pages, page_size, kv_heads, head_dim]
    states[r][spec.name]: [slots, *spec.shape]
    joined: where the states of all layers lie together, the whole tensors, [layers, slots, *spec.shape]; else empty.
    """

    page_size: int
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    joined: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Capture:
    """Keep the recurrent state in the middle of a step: see Batch.captures."""

    row: int  # of the sequence in the batch
    tokens: int  # of its query tokens in this step, after which the state is taken; 1..query_lengths[row]
    slot: int  # where it goes


@dataclass
class Batch:
    """One step's work: prefill chunks and decode tokens of several sequences, packed. Built by the scheduler.

    T = total query tokens, B = sequences, P = pages of the longest sequence.
    """

    sequences: list[Sequence]
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each query token in its own sequence
    query_lengths: list[int]  # [B] query tokens of each sequence; they sum to T
    context_lengths: list[int]  # [B] tokens already computed before this step
    page_table: torch.Tensor  # [B, P] int64, padded with 0
    slot_mapping: torch.Tensor  # [T] int64, page * page_size + offset where each query token's K and V go
    state_slots: torch.Tensor  # [B] int64 (-1 where the model has no recurrent state)
    logits_rows: torch.Tensor  # [N] int64, rows of the T whose logits are wanted
    captures: list[Capture] = field(default_factory=list)  # by row, then tokens; only in steps with prefill
