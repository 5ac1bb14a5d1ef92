"""Token ids to text, one token at a time.

Two kinds of vocabulary are read: byte level (GPT-2's table, used by Qwen, gpt-oss, DeepSeek, SmolLM2) and
SentencePiece with byte fallback (Mixtral, Gemma). Both come down to bytes per token; text is given out as soon as its
bytes are whole characters, so joined pieces equal the decoding of all tokens at once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftengine.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Each token's own bytes. `skipped` ids (special tokens) and ids outside the vocabulary have none."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = byte_alphabet() if "ByteLevel" in kinds else None
        if self._byte_level is None and not kinds & {"ByteFallback", "Metaspace"}:
            raise CheckpointError(
                f"tokenizer.json decodes by {', '.join(sorted(kinds)) or 'nothing'}; "
                "byte level and SentencePiece with byte fallback are served"
            )
        self.strips_first_space = bool(kinds & {"Strip", "Metaspace"})
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = b"" if token in self._skipped else self.spelled(token)
        return found

    def spelled(self, token: int) -> bytes:
        """The token's bytes, special or not."""
        text = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        if self._byte_level is not None:
            table = self._byte_level
            known = all(character in table for character in text)  # added tokens are stored as they read
            return bytes(table[character] for character in text) if known else text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()


class IncrementalDecoder:
    """One answer's text. Bytes that can never become a character come out as U+FFFD."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = token_bytes.strips_first_space

    def feed(self, tokens: Sequence[int]) -> str:
        return self._out(self._utf8.decode(b"".join(self._bytes[token] for token in tokens)))

    def finish(self) -> str:
        return self._out(self._utf8.decode(b"", final=True))

    def _out(self, text: str) -> str:
        if self._first and text:
            self._first = False
            return text.removeprefix(" ")
        return text


def byte_alphabet() -> dict[str, int]:
    """GPT-2's reversible table: printable Latin-1 characters stand for themselves, the other bytes from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


def _decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    decoder = tokenizer.decoder
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())  # its part of tokenizer.json
    parts = state.get("decoders", [state])
    return frozenset(str(part.get("type")) for part in parts)
