"""A model whose forward follows a script: named in FT_PLUGINS, it serves checkpoints of "ScriptedForCausalLM".

Everything around the forward is the real engine. The model keeps each token's id in its one KV layer and reads the
whole sequence back through the page table, before the first token of its answer and again after the last, so a page
that is lost, shared or overwritten wrongly ends the engine instead of passing unseen. config.json names the script
("script", see tests/support/script.py).
"""

from __future__ import annotations

from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer

from ftengine.core import Batch, CacheLayout, CacheTensors, Sequence
from ftengine.models import base
from ftengine.weights.checkpoint import Checkpoint
from tests.support.script import SCRIPTS

ARCHITECTURE = "ScriptedForCausalLM"
CERTAIN = 100.0  # the scripted token's logit above the others' 0: sampling at temperature 1 cannot miss it


class ScriptedModel:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.vocab_size = checkpoint.vocab_size
        self.max_context = checkpoint.max_context
        self.eos_token_ids = checkpoint.eos_token_ids
        self.cache_layout = CacheLayout(kv_layers=1, kv_heads=1, head_dim=1, dtype="float32")
        self._tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
        self._script = SCRIPTS[checkpoint.config["script"]]
        self._answers: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """float32 logits, [len(batch.logits_rows), vocab_size]: `CERTAIN` at the scripted token, else 0."""
        slots = cache.keys[0].view(-1)
        slots[batch.slot_mapping] = batch.input_ids.to(slots.dtype)
        cache.values[0].view(-1)[batch.slot_mapping] = batch.positions.to(slots.dtype)
        logits = torch.zeros(len(batch.logits_rows), self.vocab_size)
        ends = list(accumulate(batch.query_lengths))
        for n, row in enumerate(batch.logits_rows.tolist()):
            i = next(i for i, end in enumerate(ends) if row < end)
            length = batch.context_lengths[i] + batch.query_lengths[i] - (ends[i] - 1 - row)
            answer = self._answer(batch.sequences[i])
            written = length - batch.sequences[i].prompt_length
            if written in (0, len(answer)):
                self._check_cache(batch, cache, i, length)
            logits[n, answer[written] if written < len(answer) else self.eos_token_ids[0]] = CERTAIN
        return logits

    def _check_cache(self, batch: Batch, cache: CacheTensors, i: int, length: int) -> None:
        pages = batch.page_table[i, : -(-length // cache.page_size)]
        tokens = cache.keys[0][pages].reshape(-1)[:length].long()
        positions = cache.values[0][pages].reshape(-1)[:length].long()
        sequence = batch.sequences[i]
        same = torch.equal(tokens, torch.tensor(sequence.tokens[:length]))
        if not same or not torch.equal(positions, torch.arange(length)):
            raise RuntimeError(f"the cache does not hold the first {length} tokens of request {sequence.request.id}")

    def _answer(self, sequence: Sequence) -> list[int]:
        if sequence not in self._answers:
            prompt = self._tokenizer.decode(sequence.request.prompt, skip_special_tokens=False)
            self._answers[sequence] = self._tokenizer.encode(self._script(prompt), add_special_tokens=False).ids
        return self._answers[sequence]


base.register(ARCHITECTURE, lambda checkpoint, options: ScriptedModel(checkpoint))
