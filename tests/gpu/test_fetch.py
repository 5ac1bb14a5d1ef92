"""Copies of blocks between host memory and slots, and the wait for the CPU's rows. Against tensors indexed in torch."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton.language as tl

from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.formats.format import BF16, NVFP4, ExpertLayout
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.buffers import FetchList, Mailbox, RouteBuffers
from ftengine.kernels.triton.fetch import admit, copy_within, fetch
from ftengine.kernels.triton.join import LATE, join
from ftengine.kernels.triton.victims import end_step
from tests.gpu.cache_setup import HIDDEN, make_banks, make_mailbox

EXPERTS = 6
LARGE, SMALL = ExpertLayout(200, 48, BF16, BF16), ExpertLayout(128, 32, NVFP4, NVFP4)


def random_bank(layout: ExpertLayout, device: str) -> ExpertBank:
    blocks = torch.randint(0, 256, (EXPERTS, layout.block_bytes), dtype=torch.uint8)
    return ExpertBank(layout, blocks.pin_memory() if device == "cuda" else blocks)


def listed(target: FetchList, pairs: list[tuple[int, int]]) -> None:
    target.count.fill_(len(pairs))
    for place, (expert, slot) in enumerate(pairs):
        target.expert[place], target.slot[place] = expert, slot


def test_blocks_of_two_sizes_arrive_whole(device: str) -> None:
    """A large block takes several programs' pieces; a small one leaves the rest of its slot alone."""
    torch.manual_seed(0)
    banks = {0: random_bank(LARGE, device), 1: random_bank(SMALL, device)}
    assert LARGE.block_bytes > 2 * 8 * 2048 > SMALL.block_bytes
    pool = SlotPool(banks, 4, 3, 4, device).tensors
    pool.blocks.fill_(7)
    buffers = RouteBuffers.allocate(1, 4, device)
    for layer, pairs in ((0, [(5, 1), (0, 6), (3, 4)]), (1, [(2, 0), (4, 6)]), (1, [])):
        expected = pool.blocks.clone()
        for expert, slot in pairs:
            expected[slot, : banks[layer].layout.block_bytes] = banks[layer].blocks[expert].to(device)
        listed(buffers.fetch, pairs)
        fetch(pool, layer, banks[layer], buffers)
        assert torch.equal(pool.blocks, expected)
    expected[[2, 3]] = expected[[6, 1]]
    moved = FetchList.allocate(4, device)
    listed(moved, [(6, 2), (1, 3)])
    copy_within(pool, moved)
    assert torch.equal(pool.blocks, expected)


@pytest.mark.parametrize("copied", [True, False])
def test_the_background_enters_the_table_at_the_end_of_the_step(copied: bool, device: str) -> None:
    """And not at all where nobody copied."""
    banks = make_banks(2, EXPERTS, device)
    pool = SlotPool(banks, 5, 0, 4, device).tensors
    pool.blocks.fill_(0)
    pool.admit[1, at.ADMIT_COUNT.value] = 2
    for place, (expert, slot) in enumerate([(4, 3), (0, 2)]):
        pool.admit[1, at.ADMIT_EXPERT.value + place], pool.admit[1, at.ADMIT_SLOT.value + place] = expert, slot
    if copied:
        admit(pool, 1, banks[1])
        assert torch.equal(pool.blocks[[3, 2]].cpu(), banks[1].blocks[[4, 0]])
    assert pool.table.eq(-1).all()
    end_step(pool)
    expected = torch.full((2, EXPERTS), -1, dtype=torch.int32)
    if copied:
        expected[1, 4], expected[1, 0] = 3, 2
    assert pool.table.tolist() == expected.tolist()
    assert pool.keys.tolist() == ([-1, -1, EXPERTS, EXPERTS + 4, -1] if copied else [-1] * 5)
    assert pool.admit[1, at.ADMIT_COUNT.value] == 0
    end_step(pool)
    assert pool.counters[:, at.ADMITTED.value].tolist() == [0, 2 * copied]


def waiting(pool: SlotPool, mailbox: Mailbox, request: int, rows: int) -> None:
    pool.tensors.state[at.REQUEST.value], pool.tensors.state[at.PENDING.value] = request, rows
    mailbox.out.copy_(torch.randn(mailbox.out.shape))


def test_join_adds_the_rows_once_they_are_there(device: str) -> None:
    torch.manual_seed(1)
    pool, mailbox = SlotPool(make_banks(1, 4, device), 0, 0, 2, device), make_mailbox(3, 2, device)
    waiting(pool, mailbox, 41, 3)
    mailbox.reply[0] = 40
    out = torch.randn(3, HIDDEN, device=device)
    expected = out + mailbox.out.to(device)

    def answer() -> None:
        time.sleep(0.2)
        mailbox.reply[0] = 41

    answering = threading.Thread(target=answer)
    answering.start()
    join(pool.tensors, 0, mailbox, out)
    answering.join()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert int(mailbox.error[0]) == 0


def test_join_adds_nothing_where_the_cpu_was_not_asked(device: str) -> None:
    pool, mailbox = SlotPool(make_banks(1, 4, device), 0, 0, 2, device), make_mailbox(2, 2, device)
    waiting(pool, mailbox, 3, 0)
    out = torch.zeros(2, HIDDEN, device=device)
    join(pool.tensors, 0, mailbox, out)
    assert out.eq(0).all()


@pytest.mark.parametrize("asked", [0, 2], ids=["alone", "with the CPU's rows"])
def test_join_adds_what_another_stream_made(asked: int, device: str) -> None:
    pool, mailbox = SlotPool(make_banks(1, 4, device), 0, 0, 2, device), make_mailbox(2, 2, device)
    waiting(pool, mailbox, 3, asked)
    mailbox.reply[0] = 3
    out, other = torch.randn(2, HIDDEN, device=device), torch.randn(2, HIDDEN, device=device)
    expected = out + other + (mailbox.out.to(device) if asked else 0.0)
    join(pool.tensors, 0, mailbox, out, other)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_cpu_that_fails_or_is_late_ends_the_wait(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, mailbox = SlotPool(make_banks(1, 4, device), 0, 0, 2, device), make_mailbox(2, 2, device)
    waiting(pool, mailbox, 3, 2)
    out = torch.zeros(2, HIDDEN, device=device)
    mailbox.error[0] = 9
    join(pool.tensors, 0, mailbox, out)
    assert (out.eq(0).all(), int(mailbox.error[0])) == (True, 9)
    mailbox.error[0] = 0
    for name, least in (("POLLS", 50), ("STOPPED", tl.constexpr(5_000_000))):
        monkeypatch.setattr(f"ftengine.kernels.triton.join.{name}", least)
    join(pool.tensors, 0, mailbox, out)
    if device == "cuda":
        torch.cuda.synchronize()
    assert (out.eq(0).all(), int(mailbox.error[0])) == (True, LATE.value)


def test_a_cpu_that_runs_and_does_not_answer_is_given_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its pulses alone: after all the time that a CPU may be stopped nothing else would end the wait."""
    pool, mailbox = SlotPool(make_banks(1, 4, device), 0, 0, 2, device), make_mailbox(2, 2, device)
    waiting(pool, mailbox, 3, 2)
    mailbox.error[1] = 2**31 - 5
    out, done = torch.zeros(2, HIDDEN, device=device), threading.Event()
    monkeypatch.setattr("ftengine.kernels.triton.join.POLLS", 10**12)

    def run() -> None:
        pulse = mailbox.error.numpy()[1:2]
        while not done.wait(0.005):
            pulse += 1  # past the largest int32

    running = threading.Thread(target=run)
    running.start()
    try:
        join(pool.tensors, 0, mailbox, out)
        if device == "cuda":
            torch.cuda.synchronize()
    finally:
        done.set()
        running.join()
    assert (out.eq(0).all(), int(mailbox.error[0])) == (True, LATE.value)
    assert int(mailbox.error[1]) < 0
