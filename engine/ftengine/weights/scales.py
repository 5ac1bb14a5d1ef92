"""Which format a stored matrix has, from the dtype of its codes and the dtypes and shapes of its scales. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.errors import CheckpointError
from ftengine.formats.format import BF16, F16, F32, FP8, FP8_BLOCK, MXFP4, NVFP4, Format
from ftengine.weights.header import TensorEntry

PLAIN = {"F32": F32, "F16": F16, "BF16": BF16}
FP8_SCALES = (*PLAIN, "F8_E8M0")
BLOCK = 128


@dataclass(frozen=True)
class Scales:
    """first: a block's, a channel's or a tensor's; second: NVFP4's, of the whole tensor."""

    first: TensorEntry | None
    second: TensorEntry | None
    reciprocal: bool


def find_format(codes: TensorEntry, shape: tuple[int, ...], scales: Scales) -> tuple[Format, tuple[int, int]]:
    """The format, and the shape of the matrix whose codes have the given shape.

    Raises CheckpointError that names the scale which is missing or does not fit.
    """
    rows, width = shape
    if codes.dtype == "F8_E4M3":
        return _fp8(codes, scales, rows, width), (rows, width)
    if codes.dtype == "U8":
        return _four_bits(codes, scales, rows, 2 * width), (rows, 2 * width)
    raise CheckpointError(f"the tensor {codes.name} has dtype {codes.dtype}, which is not read")


def _fp8(codes: TensorEntry, scales: Scales, rows: int, columns: int) -> Format:
    first = _present(codes, scales.first, "weight_scale")
    if scales.second is not None:
        raise CheckpointError(f"the tensor {codes.name} is FP8, and {scales.second.name} has no place beside it")
    _want_dtype(first, FP8_SCALES)
    shape = grid_shape(first.shape)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if shape == blocks and (first.name.endswith("_inv") or blocks != (1, 1)):
        return FP8_BLOCK
    if shape in ((), (1,), (1, 1), (rows,), (rows, 1)):
        return FP8
    raise CheckpointError(
        f"the tensor {first.name} has shape {list(first.shape)}; FP8 is read with a scale for the tensor, for each of "
        f"the {rows} rows or for each of {list(blocks)} blocks of 128 x 128"
    )


def grid_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """ModelOpt keeps axes of length one between those of its blocks."""
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else shape


def _four_bits(codes: TensorEntry, scales: Scales, rows: int, columns: int) -> Format:
    first = _present(codes, scales.first, "weight_scale")
    if first.dtype == "F8_E4M3":
        second = _present(codes, scales.second, "weight_scale_2")
        _want_dtype(second, ("F32",))
        if second.shape not in ((), (1,)):
            raise CheckpointError(f"the tensor {second.name} has shape {list(second.shape)}, expected one number")
        _want_groups(first, rows, columns, 16)
        return NVFP4
    _want_dtype(first, ("U8", "F8_E8M0", "F8_E4M3"))
    if scales.second is not None:
        raise CheckpointError(f"the tensor {codes.name} is MXFP4, and {scales.second.name} has no place beside it")
    _want_groups(first, rows, columns, 32)
    return MXFP4


def _present(codes: TensorEntry, entry: TensorEntry | None, leaf: str) -> TensorEntry:
    if entry is None:
        raise CheckpointError(f"the tensor {codes.name} is {codes.dtype}, and its {leaf} is missing")
    return entry


def _want_dtype(entry: TensorEntry, dtypes: tuple[str, ...]) -> None:
    if entry.dtype not in dtypes:
        raise CheckpointError(f"the tensor {entry.name} has dtype {entry.dtype}, expected {' or '.join(dtypes)}")


def _want_groups(entry: TensorEntry, rows: int, columns: int, width: int) -> None:
    expected = (rows, -(-columns // width))
    if entry.shape != expected:
        raise CheckpointError(f"the tensor {entry.name} has shape {list(entry.shape)}, expected {list(expected)}")
