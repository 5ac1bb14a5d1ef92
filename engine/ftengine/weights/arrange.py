"""How the weights of a safetensors checkpoint lie on disk: told from tensor names, dtypes and shapes alone. Torch-free.

One canonical weight may be a tensor with scales beside it, or a part of a tensor that holds all experts of a layer:

    x.weight                    BF16, F16, F32; FP8 with x.weight_scale or x.weight_scale_inv (a tensor's, a channel's
                                or a 128 x 128 block's); NVFP4 as U8 with x.weight_scale (F8_E4M3), x.weight_scale_2
    x.weight_packed             NVFP4 with x.weight_scale and x.weight_global_scale, one over the second scale; MXFP4
                                with x.weight_scale (U8) alone
    experts.gate_up_proj        [E, 2I, H], gate's rows first (transformers 5), or transposed, [E, H, 2I]
                                (transformers 4); FP8 with gate_up_proj_scale_inv, each half with scales of its own
    experts.gate_up_proj_blocks [E, 2I, H / 32, 16] with gate_up_proj_scales [E, 2I, H / 32]: gpt-oss, MXFP4; gate and
                                up take turns row by row, in gate_up_proj_bias too
"""

from __future__ import annotations

import re

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.fused_experts import FUSED, FUSED_LEAVES, fused_experts
from ftengine.weights.header import TensorEntry
from ftengine.weights.names import canonical
from ftengine.weights.scales import PLAIN, find_format
from ftengine.weights.stored import CODES, SCALES, SECOND_SCALES, Module, Piece, Stored, codes_and_scales

# Of activations and of a quantized cache: what they scale is not quantized here.
UNUSED = re.compile(r"(^|[._])(input_scale|input_global_scale|activation_scale|output_scale|[qkv]_scale|kv_scale)$")
# Weights that mean nothing without a step that nobody here takes.
REFUSED = {"weight_zero_point", "pre_quant_scale", "svdquant_lora_a", "qweight", "qzeros", "weight_shape", "absmax"}


def arrange(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Every weight by canonical name. Raises CheckpointError for scales that are missing or do not fit."""
    arranged: dict[str, Stored] = {}
    interleaved = checkpoint.architecture.startswith("GptOss")
    modules = _modules(checkpoint)
    for name, module in modules.items():
        for stored in fused_experts(name, modules, interleaved) if FUSED.match(name) else _module(name, module):
            if stored.name in arranged:
                other = arranged[stored.name].codes.entry.name
                raise CheckpointError(f"the tensors {stored.codes.entry.name} and {other} are the same one")
            arranged[stored.name] = stored
    return arranged


def _modules(checkpoint: Checkpoint) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for entry in checkpoint.tensors().values():
        name = canonical(entry.name)
        if name is None:
            continue
        fused = FUSED.match(name)
        if fused:
            module, leaf = fused[1], FUSED_LEAVES.get(fused[2])
            if leaf is None:
                raise CheckpointError(f"the tensor {entry.name} belongs to a form of experts that is not read")
        else:
            module, _, leaf = name.rpartition(".")
        if UNUSED.search(leaf):
            continue
        if leaf in REFUSED:
            raise CheckpointError(f"the tensor {entry.name} belongs to a quantization that is not read")
        if 0 in entry.shape:
            raise CheckpointError(f"the tensor {entry.name} is empty")
        others = modules.setdefault(module, {})
        if leaf in others:
            raise CheckpointError(f"the tensors {entry.name} and {others[leaf].name} are the same one")
        others[leaf] = entry
    return modules


def _module(name: str, module: Module) -> list[Stored]:
    codes, scales = codes_and_scales(module)
    alone = {leaf: entry for leaf, entry in module.items() if leaf not in (*CODES, *SCALES, *SECOND_SCALES)}
    weights = [_plain(f"{name}.{leaf}" if name else leaf, entry) for leaf, entry in alone.items()]
    if codes is None:
        return weights
    if codes.dtype in PLAIN:
        if scales.first is not None:
            raise CheckpointError(f"the tensor {codes.name} is {codes.dtype}, and {scales.first.name} would scale it")
        return [*weights, _plain(f"{name}.weight", codes)]
    if len(codes.shape) != 2:
        raise CheckpointError(f"the tensor {codes.name} is {codes.dtype} and not a matrix")
    kind, shape = find_format(codes, codes.shape, scales)
    stored = Stored(
        f"{name}.weight",
        shape,
        kind,
        Piece(codes),
        codes.nbytes + sum(entry.nbytes for entry in (scales.first, scales.second) if entry),
        Piece(scales.first) if scales.first else None,
        Piece(scales.second) if scales.second else None,
        scales.reciprocal,
    )
    return [*weights, stored]


def _plain(name: str, entry: TensorEntry) -> Stored:
    kind = PLAIN.get(entry.dtype)
    if kind is None:
        raise CheckpointError(
            f"the tensor {entry.name} has dtype {entry.dtype}; without scales, served are {', '.join(sorted(PLAIN))}"
        )
    return Stored(name, entry.shape, kind, Piece(entry), entry.nbytes)
