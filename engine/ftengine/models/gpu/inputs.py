"""A step's integers on the device, by one copy from pinned memory a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy
import torch

from ftengine.core import Batch, CacheTensors
from ftengine.kernels.triton.captures import Captures
from ftengine.kernels.triton.delta_prefill import Chunk

FIELDS = ("ids", "positions", "lengths", "slot_mapping", "state_slots", "fresh")


@dataclass(frozen=True)
class DecodeInputs:
    """Views of the device's buffer for B sequences; all int32. See the kernels for what each means."""

    ids: torch.Tensor  # [B]
    positions: torch.Tensor  # [B]
    lengths: torch.Tensor  # [B], keys of each sequence with its new token
    slot_mapping: torch.Tensor  # [B]
    state_slots: torch.Tensor  # [B]
    fresh: torch.Tensor  # [B], 1 where the sequence begins
    page_table: torch.Tensor  # [B, P]


class InputBuffers:
    """For up to `tokens` sequences of up to `pages` pages. The views of every B begin at the same addresses."""

    def __init__(self, tokens: int, pages: int, device: torch.device) -> None:
        self.tokens = tokens
        self.pages = pages
        self._header = len(FIELDS) * tokens
        size = self._header + tokens * pages
        # Two, in turns: a step may be prepared while the one before still waits to be copied.
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)

    def views(self, rows: int) -> DecodeInputs:
        """For a step of `rows` sequences."""
        header = self._device[: self._header].view(len(FIELDS), self.tokens)
        table = self._device[self._header :].view(self.tokens, self.pages)
        ids, positions, lengths, slot_mapping, state_slots, fresh = (field[:rows] for field in header)
        return DecodeInputs(ids, positions, lengths, slot_mapping, state_slots, fresh, table[:rows])

    def fill(self, batch: Batch) -> None:
        """Queues the copy of a batch with one token a sequence. The copy before the last one must be done."""
        rows = len(batch.sequences)
        numbers = self._turn()
        header = numbers[: self._header].reshape(len(FIELDS), self.tokens)
        positions = batch.positions.numpy()
        header[0, :rows] = batch.input_ids.numpy()
        header[1, :rows] = positions
        header[2, :rows] = positions + 1
        header[3, :rows] = batch.slot_mapping.numpy()
        header[4, :rows] = batch.state_slots.numpy()
        header[5, :rows] = positions == 0
        table = numbers[self._header :].reshape(self.tokens, self.pages)
        # What lies beyond a sequence's pages is of an earlier step, and not read.
        table[:rows, : batch.page_table.shape[1]] = batch.page_table.numpy()
        self._copy(rows)

    def fill_spare(self, rows: int, cache: CacheTensors) -> None:
        """A step that writes only where no sequence's keys, values and states are; for warming up."""
        page, slot = _spare(cache)
        numbers = self._turn()
        header = numbers[: self._header].reshape(len(FIELDS), self.tokens)
        header[:, :rows] = 0
        header[2, :rows] = 1
        header[3, :rows] = page * cache.page_size
        header[4, :rows] = slot
        header[5, :rows] = 1
        numbers[self._header :].reshape(self.tokens, self.pages)[:rows] = page
        self._copy(rows)

    def _turn(self) -> numpy.ndarray:
        self._hosts.reverse()
        return self._hosts[0].numpy()

    def _copy(self, rows: int) -> None:
        end = self._header + rows * self.pages
        self._device[:end].copy_(self._hosts[0][:end], non_blocking=True)


def spare_chunk(cache: CacheTensors, tokens: int) -> Batch:
    """The beginning of a sequence of up to a page of tokens, which writes where no sequence does; for warming up."""
    page, slot = _spare(cache)
    row = torch.arange(tokens)
    return Batch(
        sequences=[],
        input_ids=torch.zeros_like(row),
        positions=row,
        query_lengths=[tokens],
        context_lengths=[0],
        page_table=torch.tensor([[page]]),
        slot_mapping=page * cache.page_size + row,
        state_slots=torch.tensor([slot]),
        logits_rows=row[-1:],
    )


def _spare(cache: CacheTensors) -> tuple[int, int]:
    """The page and the slot that `allocate_cache` adds for a device."""
    page = cache.keys[0].shape[0] - 1 if cache.keys else 0
    slot = next(iter(cache.states[0].values())).shape[0] - 1 if cache.states else -1
    return page, slot


@dataclass(frozen=True)
class PrefillInputs:
    """A packed batch of T tokens of B sequences. Tensors are int32 on the device; the rest is for launching."""

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T]
    query_start: torch.Tensor  # [B + 1]
    context: torch.Tensor  # [B]
    page_table: torch.Tensor  # [B, P]
    logits_rows: torch.Tensor  # [N]
    chunks: list[Chunk]  # of the B sequences
    longest: int  # tokens of a sequence

    @staticmethod
    def of(batch: Batch, device: torch.device) -> PrefillInputs:
        """Queues the copy."""
        starts = numpy.cumsum([0, *batch.query_lengths])
        arrays = [
            batch.input_ids.numpy(),
            batch.positions.numpy(),
            batch.slot_mapping.numpy(),
            starts,
            numpy.asarray(batch.context_lengths),
            batch.page_table.numpy().reshape(-1),
            batch.logits_rows.numpy(),
            numpy.array([(capture.tokens, capture.slot) for capture in batch.captures], dtype=numpy.int64).reshape(-1),
        ]
        flat = torch.from_numpy(numpy.concatenate(arrays).astype(numpy.int32))
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        ids, positions, slots, query_start, context, table, rows, places = torch.split(flat, [len(a) for a in arrays])
        lengths = batch.query_lengths
        states = batch.state_slots.tolist()
        captures = _captures(batch, places.view(-1, 2))
        chunks = [
            Chunk(row, length, slot, before == 0, captures.get(index))
            for index, (row, length, slot, before) in enumerate(
                zip(starts.tolist(), lengths, states, batch.context_lengths, strict=False)
            )
        ]
        table = table.view(len(lengths), -1)
        return PrefillInputs(ids, positions, slots, query_start, context, table, rows, chunks, max(lengths))


def _captures(batch: Batch, places: torch.Tensor) -> dict[int, Captures]:
    """By row of the batch. places: those of batch.captures in their order, which is by rows."""
    counts = Counter(capture.row for capture in batch.captures)
    return {
        row: Captures(part, len(part))
        for row, part in zip(counts, torch.split(places, list(counts.values())), strict=True)
    }
