"""Packs one step's work of several sequences into a Batch."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Rows follow the order of `work`. Every sequence has pages for its query tokens already."""
    input_ids: list[int] = []
    positions: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    tables: list[torch.Tensor] = []
    logits_rows: list[int] = []
    for item in work:
        sequence, start, end = item.sequence, item.sequence.computed, item.sequence.computed + item.tokens
        input_ids += sequence.tokens[start:end]
        table = torch.tensor(sequence.pages[: -(-end // page_size)], dtype=torch.int64)
        position = torch.arange(start, end, dtype=torch.int64)
        positions.append(position)
        slots.append(table[position // page_size] * page_size + position % page_size)
        tables.append(table)
        if item.reaches_end:
            logits_rows.append(len(input_ids) - 1)
    return Batch(
        sequences=[item.sequence for item in work],
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.cat(positions),
        query_lengths=[item.tokens for item in work],
        context_lengths=[item.sequence.computed for item in work],
        page_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
        slot_mapping=torch.cat(slots),
        state_slots=torch.tensor([item.sequence.state_slot for item in work], dtype=torch.int64),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
    )
