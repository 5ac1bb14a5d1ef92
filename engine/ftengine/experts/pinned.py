"""Host memory that the GPU reads by itself: pinned where the system allows it, and looked at afterwards.

A refusal is a value with a reason, for there is a slower way that works. CUDA's own limits are not to be asked for:
the driver pins without regard to RLIMIT_MEMLOCK on most systems, and under WSL 2 Windows sets a bound of its own. So
pinning is tried, and what could have forbidden it is named where it was.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ftengine.experts.pool import ExpertBank

PORTABLE, MAPPED = 0x1, 0x2  # cudaHostRegister's flags, cuda_runtime_api.h
CHUNK = 4 << 30  # bytes that are registered at a time
PAGE = 4096
SAMPLES = 4096  # words of a bank that are compared


@dataclass(frozen=True)
class Pinned:
    """Until `close`, which must come before the memory is given back."""

    chunks: tuple[tuple[int, int], ...]  # address, bytes
    _unregister: Callable[[int], Any]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.chunks)

    def close(self) -> None:
        """Waits for the GPU. Afterwards it must not be given the memory any more."""
        for address, _ in self.chunks:
            self._unregister(address)


@dataclass(frozen=True)
class Refused:
    """reason: a clause with numbers, such as "pinning 16.88 GiB was refused at ..."."""

    reason: str
    nbytes: int


@dataclass(frozen=True)
class PinLimits:
    """memlock: bytes of RLIMIT_MEMLOCK, None without a limit; wsl: whether Windows is below; total: bytes of memory."""

    memlock: int | None
    wsl: bool
    total: int

    def explain(self, nbytes: int) -> str:
        """What may have forbidden to pin so much, as the end of a sentence; empty if nothing is known."""
        if self.wsl and nbytes > self.total // 2:
            half = gigabytes(self.total // 2)
            return f"; under WSL 2 Windows pins no more than about half of the memory, {half} here"
        if self.memlock is not None and nbytes > self.memlock:
            return f"; the limit of locked memory is {gigabytes(self.memlock)}, `ulimit -l unlimited` lifts it"
        return ""


def pin_limits() -> PinLimits:
    import psutil

    return PinLimits(_memlock(), "microsoft" in platform.release().lower(), int(psutil.virtual_memory().total))


def _memlock() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def pin(tensor: torch.Tensor, limits: PinLimits | None = None) -> Pinned | Refused:
    """Makes a contiguous host tensor that starts on a page readable for every GPU; about 0.06 s a GiB.

    Whole or not at all: where a part is refused, the parts before are given back.
    """
    if not torch.cuda.is_available():
        return Refused("no GPU", tensor.nbytes)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return register(tensor, runtime, limits or pin_limits())


def register(tensor: torch.Tensor, runtime: Any, limits: PinLimits) -> Pinned | Refused:
    """`pin` with a CUDA runtime that has cudaHostRegister and cudaHostUnregister."""
    begin, size = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous() or begin % PAGE:
        return Refused(f"{gigabytes(size)} of weights do not start on a page of memory", size)
    done: list[tuple[int, int]] = []
    for offset in range(0, size, CHUNK):
        address, length = begin + offset, min(CHUNK, size - offset)
        status = int(runtime.cudaHostRegister(address, length, PORTABLE | MAPPED))
        if status != 0:
            Pinned(tuple(done), runtime.cudaHostUnregister).close()
            _forget_error()
            return Refused(
                f"pinning {gigabytes(size)} was refused at {gigabytes(offset)} (CUDA error {status}"
                f"{_meaning(status)}){limits.explain(size)}",
                size,
            )
        done.append((address, length))
    return Pinned(tuple(done), runtime.cudaHostUnregister)


def gigabytes(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


MEANINGS = {1: "not possible for this memory", 2: "out of memory", 712: "already pinned", 801: "not supported here"}


def _meaning(status: int) -> str:
    return f", {MEANINGS[status]}" if status in MEANINGS else ""


def _forget_error() -> None:
    """CUDA reports a refused call again with the next launch of a kernel: let that be one of no consequence."""
    if not torch.cuda.is_available():
        return
    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        pass


def verify_readable(bank: ExpertBank, device: torch.device | str) -> str | None:
    """Whether kernels on `device` read from the bank what the host wrote, at sampled places of every expert.

    None if they do; else what is wrong, a clause. A copy or mapping that silently does nothing is found here, when the
    model loads, and not as wrong tokens.
    """
    from ftengine.kernels.triton.handshake import read_words

    blocks = bank.blocks.view(torch.int32)
    experts, width = blocks.shape
    words = (_sampled(experts, width) + width * torch.arange(experts).unsqueeze(1)).flatten()
    expected = blocks.flatten()[words]
    found = ~expected.to(device)  # what stays if nothing is read
    read_words(blocks, words.to(device), found)
    wrong = int((found.cpu() != expected).sum())
    if wrong == 0:
        return None
    return f"the GPU reads {wrong} of {len(words)} sampled words of pinned memory wrongly"


def verify_copied(bank: ExpertBank, slots: torch.Tensor) -> str | None:
    """The same for experts that were copied. slots: uint8 [E, at least a block], on the device, in the bank's order."""
    blocks, copies = bank.blocks.view(torch.int32), slots.view(torch.int32)
    places = _sampled(*blocks.shape)
    found = copies.gather(1, places.to(slots.device)).cpu()
    wrong = int((found != blocks.gather(1, places)).sum())
    if wrong == 0:
        return None
    return f"{wrong} of {places.numel()} sampled words of experts are wrong after they were copied to the GPU"


def _sampled(experts: int, width: int) -> torch.Tensor:
    """int64 [experts, n]: places among each expert's `width` words, the first and the last one among them."""
    generator = torch.Generator().manual_seed(experts * width)
    places = torch.randint(width, (experts, max(2, SAMPLES // max(experts, 1))), generator=generator)
    places[:, 0], places[:, 1] = 0, width - 1
    return places
