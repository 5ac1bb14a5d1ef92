"""The command lines of the GPU's benches, and what they need. Torch-free.

A bench that is run as a program calls `begin` before it imports PyTorch and Triton, so that neither --help nor the
reason why it cannot run here needs them; then `parse` gives what was asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ftengine.bench.shapes import QWEN36
from ftengine.config import EngineConfig
from ftengine.formats.format import FORMATS
from ftengine.memory.gpu import NoGpu, probe, unusable
from ftengine.memory.plan import lane_threads
from ftengine.models.gpu.strategy import PREFETCH
from ftengine.switches import POLICIES

STRATEGIES = ("resident", "offload", "cpu", "hybrid")
DTYPES = ("bfloat16", "float32")


def begin(bench: str, about: str | None) -> None:
    """Ends the program after --help, where its arguments are wrong, and where there is no GPU that it could use."""
    options = parse(bench, about)
    if getattr(options, "device", "cuda") != "cuda":
        return
    found = probe()
    torch_cuda = None
    if not isinstance(found, NoGpu):
        import torch

        torch_cuda = torch.version.cuda
    if (lacking := unusable(found, torch_cuda)) is not None:
        sys.exit(f"Error: {bench} needs a GPU: {lacking.reason}\nTry:   ft doctor")


def parse(bench: str, about: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """bench: its module's name; about: its docstring. arguments: None for the program's."""
    program, formatter = f"python -m ftengine.bench.{bench}", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=about, formatter_class=formatter)
    BENCHES[bench](parser)
    return parser.parse_args(arguments)


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder or a GGUF file")
    parser.add_argument("--strategy", choices=STRATEGIES, default="hybrid")
    parser.add_argument("--slots-percent", type=int, default=25)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, help="of the CPU's lane")
    parser.add_argument("--device", choices=["cuda", "interpret"], default="cuda")


def _experts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "fp8", "fp8-block", "bf16"], choices=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--grouped", nargs="*", type=int, default=[64, 1024, 8192], help="tokens of a prefill chunk")
    parser.add_argument("--all", action="store_true", help="every candidate configuration, not only the first")
    parser.add_argument("--hidden", type=int, default=QWEN36["hidden_size"])
    parser.add_argument("--intermediate", type=int, default=QWEN36["moe_intermediate_size"])
    parser.add_argument("--top-k", type=int, default=QWEN36["num_experts_per_tok"])


def _linear(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="time every candidate of every case")
    parser.add_argument("--only", default="", help="cases whose name contains this")


def _mixers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiles", action="store_true", help="attention with each of several tiles, and nothing else")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=256, help="of a layer")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--strategy", choices=STRATEGIES, default="resident")
    parser.add_argument("--slots-percent", type=int, default=25)
    parser.add_argument("--staging", type=int, default=128, help="experts")
    parser.add_argument("--threads", type=int, default=_lane(), help="of the CPU's lane")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=200, help="a sequence, that are decoded")
    parser.add_argument("--prefill", type=int, nargs="*", default=[16, 128, 512, 8192])
    parser.add_argument("--check", action="store_true", help="compare logits with the CPU's decoder first")
    parser.add_argument("--no-branches", action="store_true", help="the shared expert after the lookup, not beside it")


def _split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=os.environ.get("MODEL"), help="a folder of weights; $MODEL")
    parser.add_argument("--layers", type=int, default=40, help="of random weights")
    parser.add_argument("--slots-percent", type=int, default=25)
    parser.add_argument("--threads", type=int, default=_lane(), help="of the CPU's lane")
    parser.add_argument("--prefetch", type=int, default=PREFETCH, help="experts a layer, at most")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--load", type=int, nargs="*", default=[0, 4], help="processes that read memory")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each fixed split")
    parser.add_argument("--follow", type=float, default=10.0, help="of the following split after a change")
    parser.add_argument("--pairs", type=_even, default=8, help="of windows of the best fixed split and the following")
    parser.add_argument("--verbose", action="store_true", help="what the split logs")


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=os.environ.get("MODEL"), help="a folder of weights; $MODEL")
    parser.add_argument("--layers", type=int, default=40, help="of random weights")
    parser.add_argument("--strategy", choices=["hybrid", "offload", "cpu"], default="hybrid", help="with some slots")
    parser.add_argument("--slots-percent", type=int, nargs="+", default=[100, 25, 10, 0])
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=[POLICIES[0]], help="of the expert cache")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="sequences")
    parser.add_argument("--warm", type=int, default=96, help="steps before some are timed")
    parser.add_argument("--steps", type=int, default=600, help="that are timed")
    parser.add_argument("--threads", type=int, default=_lane(), help="of the CPU's lane")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "interpret"], default="cuda")


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


def _lane() -> int:
    return lane_threads(EngineConfig("")).value


def _even(text: str) -> int:
    number = int(text)
    if number < 2 or number % 2:
        raise argparse.ArgumentTypeError(f"{number} is not an even number of pairs")
    return number


BENCHES = {
    "gpu_check": _check,
    "gpu_experts": _experts,
    "gpu_linear": _linear,
    "gpu_mixers": _mixers,
    "gpu_model": _model,
    "gpu_route": _nothing,
    "gpu_sampling": _nothing,
    "gpu_split": _split,
    "gpu_step": _step,
}
