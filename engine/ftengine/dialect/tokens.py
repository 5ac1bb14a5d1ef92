"""The checkpoint's tokenizer.json: text to ids and back, with control tokens under our hand."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftengine.dialect.control import MARKUP, ControlTokens, unguarded
from ftengine.dialect.decode import IncrementalDecoder, TokenBytes
from ftengine.dialect.unicode import well_formed
from ftengine.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENIZER_BYTES = 256 << 20
UNUSUAL = "a \U0010fffd\n"  # a vocabulary without the unknown token that it names fails now and not at a request
CACHE_CHARACTERS = 16 << 20  # about ten long agent prompts
_MARKUP_STARTS = ("<|", "<｜", "｜", *MARKUP)


class TokenCodec:
    """Encodes rendered prompts and plain text, decodes answers. Safe to use from several threads.

    Control tokens are the vocabulary's special tokens and those other added tokens that the template writes or that
    look like markup (`<|file_sep|>`, `<tool_call>`). In rendered text they are found here and not by the tokenizer,
    which sees only the text between, with control tokens switched off. An agent's next request repeats almost all of
    that text, so encoded pieces are kept.
    """

    def __init__(self, source: Path | bytes, template: str) -> None:
        """source: a tokenizer.json, or the content of one."""
        self._tokenizer = _load(source)
        self.identity = _digest(source)  # of the tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        control = {
            token.content: (number, token)
            for number, token in added.items()
            if token.special or _is_markup(token.content, template)
        }
        self._ids = {content: number for content, (number, _) in control.items()}
        self._contents = {number: content for content, number in self._ids.items()}
        self._swallow_before = {content for content, (_, token) in control.items() if token.lstrip}
        self._swallow_after = {content for content, (_, token) in control.items() if token.rstrip}
        self.control = ControlTokens(control)
        special = frozenset(number for number, token in added.items() if token.special)
        self._prefix = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        self._switch_off([token for _, token in control.values()])
        self._space_first = _take_over_first_space(self._tokenizer)
        self._bytes = TokenBytes(self._tokenizer, special)
        self._pieces = _PieceCache(CACHE_CHARACTERS)

    def token_id(self, content: str) -> int | None:
        """A control token's id."""
        return self._ids.get(content)

    def control_text(self, token: int) -> str | None:
        """A control token's content; None: another token."""
        return self._contents.get(token)

    def encode_rendered(self, rendered: str) -> tuple[str, list[int]]:
        """A template's output (content guarded) to the text as the model sees it and its ids."""
        pieces = self.control.pieces(well_formed(rendered))
        ids = [token for piece in self.encode_pieces(pieces) for token in piece]
        return "".join(map(unguarded, pieces)), ids

    def encode_pieces(self, pieces: list[str], *, at_start: bool = True) -> list[list[int]]:
        """The ids of each piece of `ControlTokens.pieces`. The lists are shared: not to be changed.

        at_start: the first piece begins the text.
        """
        if self._swallow_before or self._swallow_after:
            pieces = list(self._trimmed(pieces))
        if at_start and self._space_first and pieces[0] and not pieces[0].startswith(" "):
            pieces = [" " + pieces[0], *pieces[1:]]
        found = self._pieces.get_all(pieces)
        return [self._encode_piece(pieces[at], at) if ids is None else ids for at, ids in enumerate(found)]

    def spelled(self, tokens: Iterable[int]) -> str:
        """Their text, control tokens included."""
        return b"".join(map(self._bytes.spelled, tokens)).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Plain text, control tokens parsed; begins with the vocabulary's begin-of-text token if it has one."""
        _, ids = self.encode_rendered(text)
        return ids if ids[:1] == self._prefix else [*self._prefix, *ids]

    def decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self._bytes)

    def token_text(self, token: int) -> str:
        return self._bytes.spelled(token).decode("utf-8", "replace")

    def _encode_piece(self, piece: str, index: int) -> list[int]:
        if index % 2:
            ids = [self._ids[piece]]
        else:
            # A batch of one: `encode` would hold the interpreter's lock, and every stream, for as long as it takes.
            ids = self._tokenizer.encode_batch_fast([unguarded(piece)], add_special_tokens=False)[0].ids
        self._pieces.put(piece, ids)
        return ids

    def _trimmed(self, pieces: list[str]) -> Iterator[str]:
        """Some control tokens swallow the whitespace beside them (`lstrip` and `rstrip` in tokenizer.json)."""
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                if index and pieces[index - 1] in self._swallow_after:
                    piece = piece.lstrip()
                if index + 1 < len(pieces) and pieces[index + 1] in self._swallow_before:
                    piece = piece.rstrip()
            yield piece

    def _switch_off(self, control: list[Any]) -> None:
        for token in control:
            token.special = True
        self._tokenizer.add_special_tokens(control)  # known ones keep their ids
        self._tokenizer.encode_special_tokens = True


def _is_markup(content: str, template: str) -> bool:
    """Of an added token that is not special. Some vocabularies add runs of spaces or newlines: those are text."""
    return content.startswith(_MARKUP_STARTS) or (content in template and not content.isspace())


class _PieceCache:
    """Least recently used pieces of text and their ids, bounded by characters."""

    def __init__(self, characters: int) -> None:
        self._room = characters
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get_all(self, pieces: list[str]) -> list[list[int] | None]:
        with self._lock:
            found = list(map(self._pieces.get, pieces))
            for piece, ids in zip(pieces, found, strict=True):
                if ids is not None:
                    self._pieces.move_to_end(piece)
            return found

    def put(self, piece: str, ids: list[int]) -> None:
        with self._lock:
            if piece in self._pieces:
                return
            self._pieces[piece] = ids
            self._room -= len(piece)
            while self._room < 0:
                oldest, _ = self._pieces.popitem(last=False)
                self._room += len(oldest)


def _load(source: Path | bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    if isinstance(source, Path):
        if not source.is_file():
            raise CheckpointError(f"{source.parent} has no tokenizer.json")
        if source.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{source} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB, which no tokenizer is")
    try:
        tokenizer = Tokenizer.from_buffer(source) if isinstance(source, bytes) else Tokenizer.from_file(str(source))
        tokenizer.encode(UNUSUAL)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        name = source if isinstance(source, Path) else "the model's tokenizer"
        raise CheckpointError(f"{name} cannot be read: {str(error)[:200]}") from None


def _digest(source: Path | bytes) -> bytes:
    digest = hashlib.sha256(sys.byteorder.encode())
    digest.update(source if isinstance(source, bytes) else source.read_bytes())
    return digest.digest()


def _take_over_first_space(tokenizer: Tokenizer) -> bool:
    """Whether text at the very start gets a space before it, which the tokenizer would do at each piece's start."""
    from tokenizers.pre_tokenizers import Metaspace

    pre_tokenizer = tokenizer.pre_tokenizer
    if not isinstance(pre_tokenizer, Metaspace) or pre_tokenizer.prepend_scheme != "first":
        return False
    pre_tokenizer.prepend_scheme = "never"
    tokenizer.pre_tokenizer = pre_tokenizer
    return True
