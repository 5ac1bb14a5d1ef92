"""Packs one step's work of several sequences into a Batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from ftengine.cache.captures import Planned
from ftengine.core import Batch, Capture, Sequence


@dataclass(frozen=True)
class Work:
    """`tokens` query tokens of a sequence, from `start` on.

    ahead: tokens that a step under way computes. The token after those is not known yet.
    captures: states to be kept in the middle of the step; their positions lie within its tokens.
    """

    sequence: Sequence
    tokens: int
    ahead: int = 0
    captures: tuple[Planned, ...] = ()

    @property
    def start(self) -> int:
        return self.sequence.computed + self.ahead

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be sampled after this step."""
        return self.start + self.tokens >= len(self.sequence.tokens)


class BatchBuilder:
    """Rows follow the order of `work`. Every sequence has pages for its query tokens already.

    numpy, not torch: a decode step's arrays are short, and torch takes several times as long for each. A sequence's
    page numbers are kept as an array from step to step: to convert a long list takes as long as all the rest.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: dict[Sequence, _Pages] = {}  # of the sequences in the last batch

    def build(self, work: list[Work]) -> Batch:
        page_size = self._page_size
        lengths = [item.tokens for item in work]
        contexts = [item.start for item in work]
        rows = [self._pages(item.sequence, -(-(item.start + item.tokens) // page_size)) for item in work]
        table = numpy.zeros((len(work), max(map(len, rows), default=0)), dtype=numpy.int64)
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_rows: list[int] = []
        for row, (item, start, pages) in enumerate(zip(work, contexts, rows, strict=True)):
            sequence, end = item.sequence, start + item.tokens
            table[row, : len(pages)] = pages
            known = sequence.tokens[start:end]
            input_ids += known + [0] * (item.tokens - len(known))
            positions += range(start, end)
            slots += [sequence.pages[at // page_size] * page_size + at % page_size for at in range(start, end)]
            if item.reaches_end:
                logits_rows.append(len(input_ids) - 1)
        self._known = {item.sequence: self._known[item.sequence] for item in work}
        return Batch(
            sequences=[item.sequence for item in work],
            input_ids=_integers(input_ids),
            positions=_integers(positions),
            query_lengths=lengths,
            context_lengths=contexts,
            page_table=torch.from_numpy(table),
            slot_mapping=_integers(slots),
            state_slots=_integers([item.sequence.state_slot for item in work]),
            logits_rows=_integers(logits_rows),
            captures=[
                Capture(row, planned.position - item.start, planned.slot)
                for row, item in enumerate(work)
                for planned in item.captures
            ],
        )

    def _pages(self, sequence: Sequence, count: int) -> numpy.ndarray:
        """The first `count` of a sequence's pages."""
        known = self._known.get(sequence)
        if known is None or known.source is not sequence.pages:
            known = self._known[sequence] = _Pages(sequence.pages)
        return known.take(count, sequence.computed // self._page_size)


class _Pages:
    """source: the list that it follows. A sequence that runs anew has a new one."""

    def __init__(self, source: list[int]) -> None:
        self.source = source
        self._numbers = numpy.zeros(0, dtype=numpy.int64)
        self._settled = (
            0  # pages that were full at the last step: the cache exchanges only those that became full since
        )

    def take(self, count: int, settled: int) -> numpy.ndarray:
        if count > len(self._numbers):
            longer = numpy.zeros(max(count, 2 * len(self._numbers)), dtype=numpy.int64)
            longer[: self._settled] = self._numbers[: self._settled]
            self._numbers = longer
        self._numbers[self._settled : count] = self.source[self._settled : count]
        self._settled = min(settled, count)
        return self._numbers[:count]


def _integers(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(numpy.array(values, dtype=numpy.int64))
