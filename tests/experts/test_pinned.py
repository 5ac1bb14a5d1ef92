"""Pinning: what is asked of CUDA, what a refusal says, and that what the GPU reads is looked at."""

from __future__ import annotations

import pytest
import torch

from ftengine.experts import pinned
from ftengine.experts.pinned import PinLimits, Pinned, Refused, pin, pin_limits, register, verify_readable
from ftengine.weights.buffer import host_buffer
from tests.experts.banks import bank

FREE = PinLimits(memlock=None, wsl=False, total=8 << 30)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Runtime:
    """Keeps book of registered memory as CUDA does, and refuses from the n-th call on."""

    def __init__(self, refuses_from: int = 1000, status: int = 2) -> None:
        self.refuses_from, self.status, self.calls = refuses_from, status, 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 3  # portable and mapped, driver_types.h
        assert address % 4096 == 0
        assert all(address + size <= a or a + s <= address for a, s in self.registered.items())
        self.calls += 1
        if self.calls > self.refuses_from:
            return self.status
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_all_bytes_are_registered_in_chunks_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 1 << 20)
    data, runtime = host_buffer((5 << 19) + 100), Runtime()
    done = register(data, runtime, FREE)
    assert isinstance(done, Pinned)
    assert runtime.calls == 3
    assert sum(runtime.registered.values()) == done.nbytes == data.nbytes
    assert min(runtime.registered) == data.data_ptr()
    done.close()
    assert runtime.registered == {}


def test_a_refusal_in_the_middle_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 1 << 20)
    runtime = Runtime(refuses_from=2)
    refused = register(host_buffer(4 << 20), runtime, FREE)
    assert refused == Refused("pinning 0.00 GiB was refused at 0.00 GiB (CUDA error 2, out of memory)", 4 << 20)
    assert runtime.registered == {}


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (PinLimits(8 << 20, False, 64 << 30), "limit of locked memory is 0.01 GiB, `ulimit -l unlimited`"),
        (PinLimits(None, True, 20 << 20), "under WSL 2 Windows pins no more than about half of the memory"),
        (PinLimits(64 << 20, False, 64 << 30), "error 2, out of memory)"),
    ],
)
def test_a_refusal_names_what_may_have_forbidden_it(limits: PinLimits, named: str) -> None:
    refused = register(host_buffer(16 << 20), Runtime(refuses_from=0), limits)
    assert isinstance(refused, Refused)
    assert named in refused.reason
    assert refused.nbytes == 16 << 20


def test_memory_that_does_not_start_on_a_page_or_has_gaps_is_refused() -> None:
    for wrong in (host_buffer(1 << 20)[64:], host_buffer(1 << 20).view(256, 4096)[:, :64]):
        refused = register(wrong, Runtime(), FREE)
        assert isinstance(refused, Refused)
        assert "page" in refused.reason


def test_limits_of_this_machine() -> None:
    limits = pin_limits()
    assert limits.total > 0
    assert limits.memlock is None or limits.memlock >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_pinned() -> None:
    assert pin(host_buffer(1 << 20)) == Refused("no GPU", 1 << 20)


@needs_gpu
def test_a_gpu_reads_pinned_memory_and_not_twice_pinned() -> None:
    one = bank("bf16")
    done = pin(one.blocks)
    assert isinstance(done, Pinned)
    assert verify_readable(one, "cuda") is None
    again = pin(one.blocks)
    assert isinstance(again, Refused)
    assert torch.ones(3, device="cuda").sum().item() == 3  # the refused call is not reported once more
    done.close()


def test_a_bank_that_the_device_reads_rightly_and_wrongly(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftengine.kernels.triton import handshake

    one = bank("nvfp4")
    done = pin(one.blocks)
    assert verify_readable(one, device) is None
    read = handshake.read_words

    def stale(source: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
        """What a mapping of other pages would give for one expert."""
        other = source.clone().pin_memory() if device == "cuda" else source.clone()
        other[3] ^= 1
        read(other, words, out)

    monkeypatch.setattr(handshake, "read_words", stale)
    assert "sampled words of pinned memory wrongly" in (verify_readable(one, device) or "")
    monkeypatch.setattr(handshake, "read_words", lambda source, words, out: None)  # a copy that silently does nothing
    wrong = verify_readable(one, device)
    assert wrong is not None
    number, of = (int(word) for word in wrong.split() if word.isdigit())
    assert number == of
    if isinstance(done, Pinned):
        done.close()
