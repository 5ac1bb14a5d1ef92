"""Byte-level BPE vocabularies, and how text is cut before it is merged.

GGUF names the way of cutting (`tokenizer.ggml.pre`) and leaves the expression to the reader. Those here are the
expressions of the published tokenizer.json files of the families that are served. Names: llama.cpp, llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # of tokenizer.ggml.token_type
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """pattern: the expression whose matches are merged apart; None: the byte-level pre-tokenizer's own (GPT-2's)."""

    pattern: str | None
    nfc: bool = False
    single_digits: bool = False
    ignore_merges: bool = False  # a piece that is a token stays one


QWEN2 = Cut(
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}",
    nfc=True,
)
QWEN35 = Cut(
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{TAIL}",
    nfc=True,
)
LLAMA3 = Cut(
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}",
    ignore_merges=True,
)
CUTS = {
    "gpt-2": Cut(None),
    "smollm": Cut(None, single_digits=True),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "qwen35": QWEN35,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
}


def byte_level_bpe(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], cut: Cut) -> Tokenizer:
    """`tokens` in id order with their `kinds`; a merge is two tokens and a space between."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != UNUSED}
    model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut.ignore_merges)
    tokenizer = Tokenizer(model)
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_steps(cut))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, tokens, kinds)
    return tokenizer


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Those that are found in text as they are written; their ids are the vocabulary's."""
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, own in zip(tokens, kinds, strict=True) if own == kind]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in added])


def _steps(cut: Cut) -> list[Any]:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single_digits else []
    if cut.pattern is None:
        return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    split = pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated", invert=False)
    return [*steps, split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
