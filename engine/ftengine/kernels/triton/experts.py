"""Routed experts of a decode step, read where they lie in the slots, byte for byte as in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ftengine.errors import FtError
from ftengine.formats.format import ExpertLayout, Format, panels
from ftengine.kernels.triton.buffers import DECODE_TOKENS, Chosen
from ftengine.kernels.triton.expert_dots import DOT_FORMATS, down_dots, gate_up_dots
from ftengine.kernels.triton.expert_mma import cut, down_mma, fits, gate_up_mma
from ftengine.kernels.triton.expert_rows import add_parts, down_parts, down_rows, gate_up_rows
from ftengine.kernels.triton.expert_tiles import geometry
from ftengine.kernels.triton.launch import PDL, launch_options
from ftengine.kernels.triton.portable import EXACT_DOT, large_shared_memory
from ftengine.kernels.triton.tuning import Config, Key, bucket, choose

# BLOCK: words of a row at a time; the matrix units where there is a SPLIT: runs of 32 words, PANELS (pairs of) panels.
# With BLOCK < 32 * num_warps the activations are read in the layout of the words: others cost an exchange each.
ROWS_GATE_UP = ((256, 16), (128, 8))
ROWS_DOWN = ((512, 32), (256, 16))
# PARTS: panels a program of one expert, whose sums are added in a launch of its own. For more than one token.
PARTS_DOWN = ((4, 64, 8), (2, 64, 4))
# SPLIT >= num_warps, or warps compute the same.
DOTS_GATE_UP = ((4, 1, 4, 3), (4, 2, 4, 3))
DOTS_DOWN = ((4, 1, 4, 3), (8, 1, 8, 1))
# num_warps, TILES: runs of 64 columns a warp. Half the instructions of the others, where format and size allow it.
MMA_GATE_UP = ((4, 4), (8, 2), (8, 4))
MMA_DOWN = ((8, 4), (16, 4), (16, 2))


def experts_decode(
    layout: ExpertLayout,
    blocks: torch.Tensor,
    chosen: Chosen,
    x: torch.Tensor,
    scratch: torch.Tensor,
    out: torch.Tensor,
    *,
    early: bool = False,
    before_adding: Callable[[], None] | None = None,
) -> None:
    """out[t] += sum over u of combine[u, t] * expert_u(x[t]); capturable, no two runs differ in a bit.

    blocks: uint8 [S, slot_bytes >= layout.block_bytes], slot_bytes a multiple of 64. chosen: see Chosen; its U and B
    may be larger than this step's. x: [T, H], T <= DECODE_TOKENS, float32 (every product exact) or bfloat16. scratch:
    [>= U, >= T, I] of the same dtype, overwritten. out: float32 [T, H]. Their rows are contiguous. early: right behind
    `fetch`, with nothing launched in between: experts that were in slots do not wait for it (expert_turns.py).
    before_adding: launches what has to come before `out` is touched.

    Raises FtError for experts with biases and for matrices of an odd size, which no served model has; ValueError for
    tensors of other shapes.
    """
    check_layout(layout, blocks)
    tokens, experts = len(x), len(chosen.combine)
    if not 0 < tokens <= DECODE_TOKENS or x.shape[1] != layout.hidden or out.shape != x.shape:
        raise ValueError(f"x {list(x.shape)}, out {list(out.shape)}: expected [1..{DECODE_TOKENS}, {layout.hidden}]")
    if scratch.dtype != x.dtype or scratch.shape[2] != layout.intermediate:
        raise ValueError(f"scratch is {scratch.dtype} {list(scratch.shape)}, x is {x.dtype}")
    if len(scratch) < experts or scratch.shape[1] < tokens or chosen.combine.shape[1] < tokens:
        raise ValueError(f"{tokens} tokens: scratch {list(scratch.shape)}, combine {list(chosen.combine.shape)}")
    tuned = _tuned(layout, blocks, chosen, x, scratch, early)
    _gate_up(layout, blocks, chosen, x, scratch, tuned[0], early)
    if before_adding is not None:
        before_adding()
    _down(layout, blocks, chosen, scratch, out, tuned[1])


def check_layout(layout: ExpertLayout, blocks: torch.Tensor) -> None:
    if layout.bias:
        raise FtError("experts with biases are not computed on the GPU", "ft serve --moe-backend cpu")
    if layout.hidden % 2 or layout.intermediate % 2:
        raise FtError("experts of an odd size are not computed on the GPU", "ft serve --moe-backend cpu")
    if blocks.shape[1] < layout.block_bytes or blocks.shape[1] % 64 or not blocks.is_contiguous():
        raise ValueError(f"blocks {list(blocks.shape)}: expected contiguous rows of {layout.block_bytes} bytes or more")


def candidates(format: Format, columns: int, tokens: int, x: torch.Tensor, gate_up: bool) -> list[Config]:
    """What may be fastest for x's type and device; the first one is right for an H200."""
    words = triton.next_power_of_2(-(-columns * format.bits // 32))
    if gate_up:
        rows = [{"BLOCK": min(block, words), "num_warps": warps} for block, warps in ROWS_GATE_UP]
    elif tokens == 1:
        rows = [{"BLOCK": block, "num_warps": warps} for block, warps in ROWS_DOWN]
    else:
        rows = [
            {"PARTS": panels, "BLOCK": min(block, words), "num_warps": warps} for panels, block, warps in PARTS_DOWN
        ]
    if x.dtype == torch.bfloat16:
        mma = [
            {"TILES": tiles, "num_warps": warps}
            for warps, tiles in (MMA_GATE_UP if gate_up else MMA_DOWN)
            if fits(format, columns, warps if gate_up else 1, tiles, x.device)
        ]
        if mma:
            return mma + rows[:1]
    if tokens == 1 or x.dtype != torch.bfloat16 or format not in DOT_FORMATS:
        return rows
    stages_that_fit = 3 if large_shared_memory(x.device) else 1
    dots = [
        {"SPLIT": split, "PANELS": panels, "num_warps": warps, "num_stages": min(stages, stages_that_fit)}
        for split, panels, warps, stages in (DOTS_GATE_UP if gate_up else DOTS_DOWN)
    ]
    return rows + dots


def _tuned(
    layout: ExpertLayout, blocks: torch.Tensor, chosen: Chosen, x: torch.Tensor, scratch: torch.Tensor, early: bool
) -> tuple[Config, Config]:
    """Timed with as many experts as there may be, all of them different ones and each used by one token. None of them
    counts as one that was in a slot, so that each launch waits for the one before."""
    tokens, sizes = len(x), (layout.hidden, layout.intermediate)
    full: list[Chosen] = []

    def everything() -> Chosen:
        if not full:
            routes = torch.arange(len(chosen.slot), dtype=torch.int32, device=x.device)
            combine = (routes[:, None] % tokens == routes[None, : chosen.combine.shape[1]]).float()
            count = torch.full_like(chosen.count, len(routes))
            full.append(Chosen(count, routes % len(blocks), combine, torch.zeros_like(count), routes))
        return full[0]

    def key(format: Format) -> Key:
        return (format.name, *sizes, bucket(tokens), len(chosen.slot) // tokens, str(x.dtype))

    gate_up = choose(
        "experts_gate_up",
        key(layout.gate_up),
        candidates(layout.gate_up, layout.hidden, tokens, x, True),
        lambda config: _gate_up(layout, blocks, everything(), x, scratch, config, early),
    )
    down = choose(
        "experts_down",
        key(layout.down),
        candidates(layout.down, layout.intermediate, tokens, x, False),
        lambda config: _down(layout, blocks, everything(), scratch, torch.zeros_like(x, dtype=torch.float32), config),
    )
    return gate_up, down


def _gate_up(
    layout: ExpertLayout,
    blocks: torch.Tensor,
    chosen: Chosen,
    x: torch.Tensor,
    scratch: torch.Tensor,
    config: Config,
    early: bool,
) -> None:
    """scratch[u, t] = silu(gate x[t]) * up x[t] for each expert u, at least where a token uses it."""
    constants: dict[str, Any] = {
        **geometry(layout.gate_up, layout.hidden, 0, blocks.shape[1]),
        "INTERMEDIATE": layout.intermediate,
        "EARLY": early,
        "PDL": PDL,
    }
    pairs, experts, tokens = panels(layout.intermediate), len(chosen.slot), len(x)
    if "TILES" in config:
        gate_up_mma[(pairs, experts)](
            x, x.stride(0), tokens, blocks, chosen.count, chosen.slot, chosen.turn, chosen.ready,
            scratch, scratch.stride(0), scratch.stride(1),
            **cut(2, tokens, config["num_warps"], config["TILES"]), num_warps=config["num_warps"],
            **constants, **launch_options(),
        )  # fmt: skip
    elif "SPLIT" in config:
        gate_up_dots[(triton.cdiv(pairs, config["PANELS"]), experts)](
            x, x.stride(0), tokens, blocks, chosen.count, chosen.slot, chosen.turn, chosen.ready,
            scratch, scratch.stride(0), scratch.stride(1),
            TOKENS=_token_block(tokens), EXACT=EXACT_DOT, **constants, **config, **launch_options(),
        )  # fmt: skip
    else:
        gate_up_rows[(pairs, experts)](
            x, x.stride(0), blocks, chosen.count, chosen.slot, chosen.turn, chosen.ready,
            chosen.combine, chosen.combine.stride(0),
            scratch, scratch.stride(0), scratch.stride(1),
            TOKENS=tokens, **constants, **config, **launch_options(),
        )  # fmt: skip


def _down(
    layout: ExpertLayout, blocks: torch.Tensor, chosen: Chosen, scratch: torch.Tensor, out: torch.Tensor, config: Config
) -> None:
    """out[t] += sum over u of combine[u, t] * down scratch[u, t]."""
    constants: dict[str, Any] = {
        **geometry(layout.down, layout.intermediate, layout.down_offset, blocks.shape[1]),
        "HIDDEN": layout.hidden,
        "PDL": PDL,
    }
    count, tokens = panels(layout.hidden), len(out)
    if "TILES" in config:
        down_mma[(count,)](
            scratch, scratch.stride(0), scratch.stride(1), tokens, blocks, chosen.count, chosen.slot,
            chosen.combine, chosen.combine.stride(0), out, out.stride(0),
            **cut(1, tokens, config["num_warps"], config["TILES"]), num_warps=config["num_warps"],
            **constants, **launch_options(),
        )  # fmt: skip
    elif "SPLIT" in config:
        down_dots[(triton.cdiv(count, config["PANELS"]),)](
            scratch, scratch.stride(0), scratch.stride(1), tokens, blocks, chosen.count, chosen.slot,
            chosen.combine, chosen.combine.stride(0), out, out.stride(0),
            TOKENS=_token_block(tokens), EXACT=EXACT_DOT, **constants, **config, **launch_options(),
        )  # fmt: skip
    elif "PARTS" in config:
        config, group = {name: value for name, value in config.items() if name != "PARTS"}, config["PARTS"]
        experts = len(chosen.slot)
        parts = torch.empty(experts, tokens, layout.hidden, dtype=torch.float32, device=out.device)
        down_parts[(triton.cdiv(count, group), experts)](
            scratch, scratch.stride(0), scratch.stride(1), blocks, chosen.count, chosen.slot,
            chosen.combine, chosen.combine.stride(0), parts,
            TOKENS=tokens, PANELS=group, **constants, **config, **launch_options(),
        )  # fmt: skip
        add_parts[(tokens, triton.cdiv(layout.hidden, 64))](
            parts, chosen.count, chosen.combine, chosen.combine.stride(0), out, out.stride(0),
            TOKENS=tokens, HIDDEN=layout.hidden, EXPERTS=triton.next_power_of_2(experts), WIDTH=64, PDL=PDL,
            **launch_options(),
        )  # fmt: skip
    else:
        down_rows[(count,)](
            scratch, scratch.stride(0), scratch.stride(1), blocks, chosen.count, chosen.slot,
            chosen.combine, chosen.combine.stride(0), out, out.stride(0),
            TOKENS=tokens, **constants, **config, **launch_options(),
        )  # fmt: skip


def _token_block(tokens: int) -> int:
    return 8 if tokens <= 8 else 16
