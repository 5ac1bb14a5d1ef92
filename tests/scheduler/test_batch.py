"""Batches against the sequences they are made of, however pages were given, exchanged and taken away meanwhile."""

from __future__ import annotations

import random

import pytest

from ftengine.core import Batch
from tests.scheduler.driver import Driver
from tests.scheduler.test_engine import BOTH, prompt
from tests.scheduler.tiny import TinyModel


class CheckingModel(TinyModel):
    def forward(self, batch: Batch, cache):
        ends = [start + count for start, count in zip(batch.context_lengths, batch.query_lengths, strict=True)]
        row, slots, ids, positions, wanted = 0, [], [], [], []
        for index, (sequence, end) in enumerate(zip(batch.sequences, ends, strict=True)):
            start = sequence.computed
            assert batch.context_lengths[index] == start
            count = -(-end // cache.page_size)
            assert batch.page_table[index, :count].tolist() == sequence.pages[:count]
            assert not batch.page_table[index, count:].any()
            assert batch.state_slots[index] == sequence.state_slot
            positions += range(start, end)
            ids += sequence.tokens[start:end]
            slots += [sequence.pages[at // cache.page_size] * cache.page_size + at % cache.page_size
                      for at in range(start, end)]  # fmt: skip
            row += end - start
            if end == len(sequence.tokens):
                wanted.append(row - 1)
        assert batch.input_ids.tolist() == ids
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert batch.logits_rows.tolist() == wanted
        return super().forward(batch, cache)


@BOTH
@pytest.mark.parametrize("pages", [20, 200])
def test_tables_follow_the_sequences_pages(recurrent: bool, pages: int) -> None:
    """Equal prompts at the same time exchange pages; few pages lead to preemption."""
    model = CheckingModel(recurrent=recurrent)
    driver = Driver(model, pages=pages, page_size=4, running=4, chunk=8)
    choose = random.Random(pages)
    for index in range(12):
        driver.submit(
            f"r{index}", prompt(choose.choice([3, 17, 30]), seed=choose.randrange(2)), choose.randrange(1, 30)
        )
    driver.run()
    assert all(result.error is None for result in driver.results.values())
    assert (driver.engine.stats()["requests"]["preempted"] > 0) == (pages == 20)
