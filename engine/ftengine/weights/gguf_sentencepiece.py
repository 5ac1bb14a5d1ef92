"""The vocabulary of SentencePiece's BPE in a GGUF file (`tokenizer.ggml.model` llama: Mixtral), as tokenizer.json.

Pieces have scores instead of merges: of two neighbours that are together a piece, those with the best piece are merged
first. The merges that say the same follow from the pieces, as in the published tokenizer.json files of this family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ftengine.errors import CheckpointError
from ftengine.weights.gguf_bpe import CONTROL, NORMAL, UNKNOWN, UNUSED, add_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
MAX_PIECE = 256  # characters of a piece that is looked at for merges; the longest published ones have 16 letters


def sentencepiece_bpe(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], *, space_first: bool
) -> Tokenizer:
    """`tokens` in id order. space_first: text begins with a space, given or not."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    if len(scores) != len(tokens):
        raise CheckpointError(f"the vocabulary has {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != UNUSED}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(tokens, kinds, scores, vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if space_first else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    add_tokens(tokenizer, tokens, [CONTROL if kind == UNKNOWN else kind for kind in kinds])
    return tokenizer


def _merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Best piece first; of one piece's ways to be merged, that of the earlier parts."""
    found = []
    for index, piece in enumerate(tokens):
        if kinds[index] != NORMAL or not 1 < len(piece) <= MAX_PIECE:
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]
