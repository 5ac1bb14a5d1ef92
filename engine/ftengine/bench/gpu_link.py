"""`python -m ftengine.bench.gpu_link`: missing experts of a layer over the link, on the CPU, and both at once.

Experts of Qwen3.6-35B-A3B in NVFP4, 1.77 MB each, one row; times are shares of a captured graph.
"""

from __future__ import annotations

import sys

import torch

from ftengine.bench.layer import Bank, Shape
from ftengine.experts.cycle import COUNTS
from ftengine.experts.pinned import Refused, pin, verify_readable
from ftengine.experts.pool import ExpertBank
from ftengine.experts.probe import LaneProbe
from ftengine.formats.format import FORMATS
from ftengine.kernels import native

LAYERS = 6  # 2.7 GB: far more than any cache


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no GPU to measure", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    shape, kind = Shape(), FORMATS["nvfp4"]
    made = [Bank(shape, kind) for _ in range(LAYERS)]
    banks = [ExpertBank(bank.layout, bank.blocks) for bank in made]
    pins = [pin(bank.blocks) for bank in banks]
    for outcome, bank in zip(pins, banks, strict=True):
        wrong = outcome.reason if isinstance(outcome, Refused) else verify_readable(bank, "cuda")
        if wrong is not None:
            print(wrong, file=sys.stderr)
            return 1
    size = banks[0].layout.used_bytes
    most = native.granted_threads()
    print(f"{torch.cuda.get_device_name()}, {most} CPU threads, {size / 1e6:.2f} MB an expert")
    for threads in dict.fromkeys((most - 1, most // 2, 4)):
        if threads >= 1:
            table(LaneProbe(banks, threads, torch.bfloat16, "cuda"), size)
    for outcome in pins:
        if not isinstance(outcome, Refused):
            outcome.close()
    return 0


def table(probe: LaneProbe, size: int) -> None:
    print(f"\n{probe.lane.threads} threads of the lane; round trip without work {probe.handshake():.1f} us")
    columns = "".join(f"{name:>10}{'GB/s':>7}" for name in ("link us", "CPU us", "both us"))
    print(f"{'experts':>8}{columns}{'(link, CPU)':>16}")
    for n in COUNTS:
        link, cpu, both = probe.link(n), probe.cpu(n), probe.both(n, n)
        rates = [n * size / us / 1e3 for us in (link, cpu)] + [2 * n * size / both.both / 1e3]
        print(
            f"{n:>8}{link:>10.1f}{rates[0]:>7.1f}{cpu:>10.1f}{rates[1]:>7.1f}{both.both:>10.1f}{rates[2]:>7.1f}"
            f"{both.link:>9.0f}{both.cpu:>7.0f}"
        )
    probe.close()


if __name__ == "__main__":
    sys.exit(main())
