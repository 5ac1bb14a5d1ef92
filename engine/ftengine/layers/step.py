"""What all layers of one forward share, worked out once from the Batch: who decodes, who prefills, where keys lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.core import Batch, Capture

QUERY_BLOCK = 256  # query rows whose scores exist at a time
MAX_PADDING = 1.5  # a padded decode group may read this many times the keys its sequences have


@dataclass(frozen=True)
class Span:
    """One sequence's query rows in the packed batch."""

    index: int  # of the sequence in the batch
    row: int
    length: int
    context: int  # tokens before this step
    captures: tuple[Capture, ...] = ()  # of this sequence, by position

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)


@dataclass(frozen=True)
class KeyRange:
    """The cached tokens [low, high) of one sequence. pages: a run of pages as a slice, or page ids."""

    pages: slice | torch.Tensor
    low: int
    high: int

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """cache [pages, page_size, heads, D] -> [high - low, heads, D]; a view where the pages are one run."""
        return cache[self.pages].flatten(0, 1)[self.low : self.high]


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query token each, attended in one call with their keys padded to the longest."""

    rows: torch.Tensor  # [B]
    pages: torch.Tensor  # [B, P]
    mask: torch.Tensor  # [B, 1, 1, L], 0 or -inf, L = P * page_size
    padding: torch.Tensor  # [n] indices into B * L of rows past a sequence's end

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """cache [pages, page_size, heads, D] -> [B, heads, L, D].

        Rows past a sequence's end may hold what an earlier sequence left, even NaN, which no mask would stop.
        """
        gathered = cache[self.pages].flatten(1, 2)
        gathered.flatten(0, 1).index_fill_(0, self.padding, 0.0)
        return gathered.transpose(1, 2)


class Step:
    """Built per forward. `window`: keys that a query sees, itself included, or None for all before it."""

    def __init__(self, batch: Batch, page_size: int, dtype: torch.dtype, window: int | None = None) -> None:
        self.batch = batch
        self.page_size = page_size
        self.dtype = dtype
        self.window = window
        spans = _spans(batch)
        self.decodes = [span for span in spans if span.length == 1]
        self.prefills = [span for span in spans if span.length > 1]
        self.decode_rows = torch.tensor([span.row for span in self.decodes], dtype=torch.int64)
        self.decode_group = self._group(self.decodes) if len(self.decodes) > 1 else None
        loose = self.prefills if self.decode_group else spans
        self.attention_spans = [(span, self._key_range(span)) for span in loose]
        self._mask = self._causal_template() if self.prefills else None

    def causal_mask(self, rows: int, before: int) -> torch.Tensor:
        """Mask [rows, before + rows] of a block of queries whose keys start `before` tokens ahead of it."""
        assert self._mask is not None
        shift = self._mask.shape[1] - QUERY_BLOCK - before
        return self._mask[:rows, shift : shift + before + rows]

    def first_key(self, position: int) -> int:
        """The earliest key that the query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def _causal_template(self) -> torch.Tensor:
        """[QUERY_BLOCK, keys + QUERY_BLOCK]; row i sees column t <= keys + i. Every block's mask is a view of it."""
        keys = max(span.context + span.length - 1 for span in self.prefills)
        if self.window is not None:
            keys = min(keys, self.window - 1)
        row = torch.arange(QUERY_BLOCK).unsqueeze(1)
        column = torch.arange(keys + QUERY_BLOCK).unsqueeze(0)
        hidden = column > keys + row
        if self.window is not None:
            hidden |= column <= keys + row - self.window
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))

    def _key_range(self, span: Span) -> KeyRange:
        low, high = self.first_key(span.context), span.context + span.length
        first, last = low // self.page_size, (high - 1) // self.page_size + 1
        pages = self.batch.page_table[span.index, first:last]
        offset = first * self.page_size
        start = int(pages[0])
        if torch.equal(pages, torch.arange(start, start + len(pages))):
            return KeyRange(slice(start, start + len(pages)), low - offset, high - offset)
        return KeyRange(pages, low - offset, high - offset)

    def _group(self, decodes: list[Span]) -> DecodeGroup | None:
        """None where padding would read far more than the sequences' own keys."""
        lengths = [span.context + 1 for span in decodes]
        pages = (max(lengths) - 1) // self.page_size + 1
        padded = pages * self.page_size
        if padded * len(decodes) > MAX_PADDING * sum(lengths) and padded * len(decodes) > 4096:
            return None
        key = torch.arange(padded)
        length = torch.tensor(lengths).unsqueeze(1)
        padding = key >= length
        hidden = padding if self.window is None else padding | (key < length - self.window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        table = self.batch.page_table[[span.index for span in decodes], :pages]
        return DecodeGroup(self.decode_rows, table, mask[:, None, None], padding.flatten().nonzero().flatten())


def _spans(batch: Batch) -> list[Span]:
    spans, row = [], 0
    for index, (length, context) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
        captures = tuple(capture for capture in batch.captures if capture.row == index)
        spans.append(Span(index, row, length, context, captures))
        row += length
    return spans
