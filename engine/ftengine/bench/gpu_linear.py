"""`python -m ftengine.bench.gpu_linear`: dense products on the GPU, each against the memory's ceiling and cuBLAS.

A case is a chain of calls on different weights, so that the L2 cache serves none of them, captured in one CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ftengine.bench.gpu_options import begin, parse

if __name__ == "__main__":
    begin("gpu_linear", __doc__)

import torch

from ftengine.formats.format import BF16, FORMATS, Format
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.kernels.triton import launch
from ftengine.kernels.triton.dequantize import dequantize_rows
from ftengine.kernels.triton.gemv import gemv_candidates, launch_gemv
from ftengine.kernels.triton.linear import linear, linear_large, rms_norm, upload
from ftengine.kernels.triton.skinny import launch_skinny, skinny_candidates
from ftengine.kernels.triton.tuning import Config

# Qwen3.6's: a Gated DeltaNet's projection, a mixer's output, router and shared expert's gate and up, the head.
SHAPES = {"in": (12352, 2048), "out": (2048, 4096), "router": (1281, 2048), "head": (248320, 2048)}
CHAIN_BYTES, CHAIN_CALLS = 512 << 20, 40
REPLAYS = 9

Call = Callable[[QuantMatrix], None]


@dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    microseconds: float
    nbytes: int  # of weights
    error: float | None = None  # largest difference from float64, as a share of the largest result


def main() -> None:
    options = parse("gpu_linear", __doc__)
    ceiling = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, PDL {'on' if launch.PDL else 'off'}, reads at {ceiling / 1e9:.0f} GB/s")
    print(f"{'case':44} {'T':>3} {'us':>9} {'GB/s':>6} {'share':>6} {'error':>8}")
    for row in cases(options.all, options.only):
        speed = row.nbytes / row.microseconds * 1e6
        error = "" if row.error is None else f"{row.error:8.1e}"
        figures = f"{row.microseconds:9.2f} {speed / 1e9:6.0f} {speed / ceiling:6.1%}"
        print(f"{row.name:44} {row.tokens:3} {figures} {error}", flush=True)
    if options.only in "upload":
        print(f"upload, 1 GiB of bf16: {upload_bandwidth() / 1e9:.1f} GB/s")


def cases(everything: bool, only: str) -> Iterator[Row]:
    for name, (rows, columns) in SHAPES.items():
        if only in f"bf16 {name}":
            yield from _shape(f"bf16 {name}", BF16, rows, columns, everything, (1, 2, 4, 8, 16))
    for kind in FORMATS.values():
        if kind is not BF16 and only in f"{kind.name} in":
            yield from _shape(f"{kind.name} in", kind, *SHAPES["in"], everything, (1, 8))
    if only in "rms_norm":
        residual, weight = torch.randn(8, 2048, device="cuda"), torch.rand(2048, device="cuda")
        out = torch.empty(8, 2048, dtype=torch.bfloat16, device="cuda")
        for tokens in (1, 8):
            run = partial(rms_norm, residual[:tokens], weight, 1e-6, out[:tokens])
            yield Row("rms_norm", tokens, chain_time([run] * CHAIN_CALLS), tokens * 2048 * 6)


def _shape(
    name: str, kind: Format, rows: int, columns: int, everything: bool, batches: tuple[int, ...]
) -> Iterator[Row]:
    """Every candidate at T = 1 and 8, the first one elsewhere; all of them everywhere if `everything`."""
    first = random_matrix(kind, rows, columns)
    nbytes = sum(item.nbytes for item in (first.codes, first.scales, first.row_scales) if item is not None)
    count = min(max(CHAIN_BYTES // nbytes, 1), CHAIN_CALLS)
    matrices = [first] + [random_matrix(kind, rows, columns) for _ in range(count - 1)]
    for tokens in batches:
        residual = torch.randn(tokens, columns, device="cuda")
        out = torch.zeros(tokens, rows, device="cuda")
        norm, x = (torch.rand(columns, device="cuda"), 1e-6), residual.bfloat16()
        timing_all = everything or (kind is BF16 and tokens in (1, 8))

        candidates = gemv_candidates(kind, columns) if tokens == 1 else skinny_candidates(kind, rows, x.dtype)
        for config in candidates if timing_all else candidates[:1]:
            call = partial(_gemv, residual, out, config, norm) if tokens == 1 else partial(_skinny, x, out, config)
            yield _timed(f"{name} {_short(config)}", call, matrices, tokens, nbytes)
        linear((first,), residual, out, norm=norm)
        normal = torch.empty_like(x)
        rms_norm(residual, norm[0], norm[1], normal)
        error = _error(first, normal, out)
        yield _timed(f"{name} linear with norm", partial(_linear, residual, out, norm), matrices, tokens, nbytes, error)
        if kind is BF16:
            yield _timed(f"{name} cuBLAS, no norm", partial(_cublas, x), matrices, tokens, nbytes)
    if kind is BF16:
        tokens = 2048
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        if rows < 100_000:
            yield _timed(f"{name} linear_large", partial(_large, x), matrices[:4], tokens, nbytes)


def _timed(
    name: str, call: Call, matrices: list[QuantMatrix], tokens: int, nbytes: int, error: float | None = None
) -> Row:
    return Row(name, tokens, chain_time([partial(call, matrix) for matrix in matrices]), nbytes, error)


def _gemv(
    x: torch.Tensor, out: torch.Tensor, config: Config, norm: tuple[torch.Tensor, float], matrix: QuantMatrix
) -> None:
    launch_gemv(matrix, x, out, config, norm=norm)


def _skinny(x: torch.Tensor, out: torch.Tensor, config: Config, matrix: QuantMatrix) -> None:
    launch_skinny(matrix, x, out, config)


def _linear(x: torch.Tensor, out: torch.Tensor, norm: tuple[torch.Tensor, float], matrix: QuantMatrix) -> None:
    linear((matrix,), x, out, norm=norm)


def _cublas(x: torch.Tensor, matrix: QuantMatrix) -> None:
    torch.mm(x, matrix.codes.T)


def _large(x: torch.Tensor, matrix: QuantMatrix) -> None:
    linear_large((matrix,), x)


def _short(config: Config) -> str:
    return ",".join(f"{key.lower().removeprefix('block_')}={value}" for key, value in config.items())


def _error(matrix: QuantMatrix, x: torch.Tensor, out: torch.Tensor) -> float:
    """Against float64 on the first rows of the matrix."""
    rows = min(matrix.rows, 4096)
    weights = torch.empty(rows, matrix.columns, device="cuda")
    dequantize_rows(matrix, 0, weights)
    expected = x.double() @ weights.double().T
    return float((out[:, :rows] - expected).abs().max() / expected.abs().max())


def random_matrix(kind: Format, rows: int, columns: int) -> QuantMatrix:
    """Random codes on the GPU, with scales that keep the sums in range: from random bytes, as packed ones are."""
    if kind.bits >= 16:
        codes = torch.randn(rows, columns, device="cuda", dtype=torch.float32).mul_(0.02)
        dtype = {32: torch.float32, 16: torch.bfloat16 if kind is BF16 else torch.float16}[kind.bits]
        return QuantMatrix(kind, rows, columns, codes.to(dtype))
    packed = torch.randint(0, 120, (kind.matrix_bytes(256, columns),), dtype=torch.uint8)
    small = upload((PackedMatrix(kind, 256, columns, packed),), "cuda")[0]
    copies = -(-rows // 256)
    codes = small.codes.repeat(copies, 1)[:rows].contiguous()
    scales, second = small.scales, small.row_scales
    if scales is not None:
        if scales.dtype.is_floating_point:
            scales = torch.rand_like(scales.float()).to(scales.dtype)
        else:
            scales = torch.randint(40, 60, scales.shape, dtype=torch.uint8, device="cuda")
        blocks = scales.repeat(copies, *([1] * (scales.dim() - 1)))
        scales = blocks[: -(-rows // 128) if kind.name == "fp8-block" else rows].contiguous()
    if second is not None:
        second = torch.rand(rows, device="cuda")
    return QuantMatrix(kind, rows, columns, codes, scales, second)


def chain_time(calls: list[Callable[[], None]]) -> float:
    """Microseconds a call: the median replay of one graph that holds them all."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times)) * 1e3 / len(calls)


def read_bandwidth() -> float:
    """Bytes a second that a sum over 4 GiB reads."""
    data = torch.zeros(1 << 30, device="cuda")
    total = torch.empty((), device="cuda")

    def read() -> None:
        torch.sum(data, 0, out=total)

    return data.nbytes / (chain_time([read]) / 1e6)


def upload_bandwidth() -> float:
    packed = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8)
    matrix = PackedMatrix(BF16, (1 << 30) // 4096, 2048, packed)
    upload((matrix,), "cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    upload((matrix,), "cuda")
    torch.cuda.synchronize()
    return packed.nbytes / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
