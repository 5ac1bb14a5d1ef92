"""The tokenizer that a GGUF file carries, as tokenizer.json.

A kind of vocabulary, or a way of cutting text, that is not known is refused: a nearly right one gives nearly right
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ftengine.errors import CheckpointError
from ftengine.weights.gguf_bpe import CUTS, Cut, byte_level_bpe
from ftengine.weights.gguf_header import GgufArray, GgufHeader
from ftengine.weights.gguf_sentencepiece import sentencepiece_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_json(header: GgufHeader) -> bytes:
    """Raises CheckpointError for a kind of vocabulary that is not read, or one that makes no sense."""
    try:
        return _build(header).to_str().encode("utf-8")
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        raise CheckpointError(f"{header.path}: its vocabulary is not usable: {str(error)[:200]}") from None


def _build(header: GgufHeader) -> Tokenizer:
    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens, kinds = _array(header, "tokens"), _array(header, "token_type")
    if len(tokens) != len(kinds):
        raise CheckpointError(f"{header.path}: {len(tokens)} tokens have {len(kinds)} types")
    if kind == "gpt2":
        tokenizer = byte_level_bpe(tokens, kinds, _array(header, "merges"), _cut(header))
    elif kind == "llama":
        prefix = metadata.get("tokenizer.ggml.add_space_prefix") is not False
        tokenizer = sentencepiece_bpe(tokens, kinds, _array(header, "scores"), space_first=prefix)
    else:
        raise CheckpointError(
            f"{header.path}: a vocabulary of the kind {str(kind)[:40]!r} is not read, only BPE (gpt2, llama)",
            "serve the model's safetensors instead",
        )
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") is True:
        _begin_with(tokenizer, tokens, metadata.get("tokenizer.ggml.bos_token_id"))
    return tokenizer


def _cut(header: GgufHeader) -> Cut:
    pre = header.metadata.get("tokenizer.ggml.pre")
    cut = CUTS.get(pre) if isinstance(pre, str) else None
    if cut is None:
        raise CheckpointError(
            f"{header.path}: text is to be cut as {str(pre)[:40]!r}, which is not known ({', '.join(CUTS)})",
            "serve the model's safetensors instead",
        )
    return cut


def _begin_with(tokenizer: Tokenizer, tokens: Sequence[str], number: Any) -> None:
    from tokenizers import processors

    if type(number) is not int or not 0 <= number < len(tokens):
        raise CheckpointError(f"the vocabulary's begin-of-text token is {str(number)[:40]}, which it does not have")
    text = tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, number)]
    )


def _array(header: GgufHeader, name: str) -> list[Any]:
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    if isinstance(value, GgufArray):
        return value.values()
    if isinstance(value, list):
        return value
    raise CheckpointError(f"{header.path} has no {name}, so its vocabulary is not usable")
