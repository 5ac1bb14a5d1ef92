"""Packs one step's work of several sequences into a Batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from ftengine.core import Batch, Sequence


@dataclass(frozen=True)
class Work:
    """`tokens` query tokens of a sequence, from `sequence.computed` on."""

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be sampled after this step."""
        return self.sequence.computed + self.tokens == len(self.sequence.tokens)


def build_batch(work: list[Work], page_size: int) -> Batch:
    """Rows follow the order of `work`. Every sequence has pages for its query tokens already.

    numpy, not torch: a decode step's arrays are short, and torch takes several times as long for each.
    """
    lengths = [item.tokens for item in work]
    contexts = [item.sequence.computed for item in work]
    ends = [context + length for context, length in zip(contexts, lengths, strict=True)]
    counts = [-(-end // page_size) for end in ends]
    table = numpy.zeros((len(work), max(counts, default=0)), dtype=numpy.int64)
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_rows: list[int] = []
    for row, (item, start, end, count) in enumerate(zip(work, contexts, ends, counts, strict=True)):
        pages = item.sequence.pages
        table[row, :count] = pages[:count]
        input_ids += item.sequence.tokens[start:end]
        positions += range(start, end)
        slots += [pages[at // page_size] * page_size + at % page_size for at in range(start, end)]
        if item.reaches_end:
            logits_rows.append(len(input_ids) - 1)
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
    )


def _integers(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(numpy.array(values, dtype=numpy.int64))
