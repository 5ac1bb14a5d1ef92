"""Tiny random models of the served architectures, fast enough to read 20,000 tokens a second, also with a vocabulary as
large as Qwen3.6's. The hybrid one's state weighs as many tokens of keys and values as Qwen3.6-35B-A3B's: about 3,100.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftengine.cache.tensors import kv_bytes_per_token, state_bytes
from ftengine.core import CacheLayout
from tests.models import tiny
from tests.support.exchanges import SHARED

TOKENIZER = SHARED / "tokenizers" / "qwen3.6"
VOCABULARY = 248_320
CONTEXT = 131_072
END_OF_TURN = 248_046
GIGABYTE = 10**9

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": CONTEXT,
}
HYBRID: dict[str, Any] = {
    "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KINDS = {"qwen3_5_moe": ("qwen3.5", HYBRID), "qwen3_moe": ("qwen3", {"intermediate_size": 32})}
# Of the large models that these stand for: Qwen3.6-35B-A3B's state, Qwen3-30B-A3B's keys and values of a token.
STATE_BYTES = 61 << 20
TOKEN_BYTES = 48 * 2 * 4 * 128 * 2


@dataclass(frozen=True)
class Budgets:
    """Bytes."""

    device: int
    host: int
    disk: int


def scaled(layout: CacheLayout, budgets: Budgets) -> Budgets:
    """What holds as many states of this small model, or tokens if it has none, as `budgets` of the large one."""
    states = state_bytes(layout)
    scale = states / STATE_BYTES if states else kv_bytes_per_token(layout) / TOKEN_BYTES
    return Budgets(*(int(size * scale) for size in (budgets.device, budgets.host, budgets.disk)))


BUDGETS = Budgets(GIGABYTE // 2, 4 * GIGABYTE, 20 * GIGABYTE)


def write(kind: str, folder: Path, **changes: Any) -> Path:
    """kind: of KINDS. A checkpoint without a tokenizer."""
    name, settings = KINDS[kind]
    return tiny.write(name, folder, **{**COMMON, **settings, **changes})


def write_speaking(kind: str, folder: Path) -> Path:
    """With Qwen3.6's vocabulary, tokenizer and template; greedy unless a request says otherwise."""
    write(kind, folder, vocab_size=VOCABULARY)
    for file in TOKENIZER.iterdir():
        shutil.copyfile(file, folder / file.name)
    tiny.change_config(folder, eos_token_id=END_OF_TURN)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder


def slot_bytes(layout: CacheLayout, page_size: int = 16) -> int:
    """Of one anchor on the device."""
    return state_bytes(layout) + page_size * kv_bytes_per_token(layout)


def least_bytes(layout: CacheLayout) -> int:
    """Of the smallest lower tier: one anchor and two chunks."""
    return state_bytes(layout) + 1024 * kv_bytes_per_token(layout)
