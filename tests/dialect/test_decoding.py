"""Ids to text, token by token, against the tokenizer library's decoding of all at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ftengine.dialect import Dialect
from ftengine.dialect.decode import byte_alphabet
from ftengine.dialect.opening import demo_template
from ftengine.dialect.tokens import TokenCodec
from ftengine.errors import CheckpointError
from tests.dialect.conftest import SMALL, library, small_dialect


def in_pieces(codec: TokenCodec | Dialect, ids: list[int], size: int) -> list[str]:
    decoder = codec.decoder()
    pieces = [decoder.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, decoder.finish()]


def test_random_ids_decode_as_at_once(qwen: Dialect, shared_tokenizer: Callable[[str], Path]) -> None:
    """Any ids, special ones and broken characters among them."""
    reference = library(shared_tokenizer("qwen3.6") / "tokenizer.json")
    chance = random.Random(7)
    for _ in range(300):
        ids = [chance.randrange(reference.get_vocab_size()) for _ in range(chance.randint(1, 12))]
        assert "".join(in_pieces(qwen, ids, 1)) == reference.decode(ids, skip_special_tokens=True)
        assert "".join(in_pieces(qwen, ids, 5)) == reference.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_no_half_character_is_given_out(text: str) -> None:
    """Round trip; as soon as a character's last byte is there, it is there."""
    dialect = small_dialect(demo_template())
    ids = dialect.encode(text)
    decoder = dialect.decoder()
    pieces = [decoder.feed([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces).replace(text, "") or "\ufffd" in text
    assert text.startswith("".join(pieces))
    assert "".join(pieces) + decoder.finish() == text


def test_markup_is_kept_and_special_tokens_are_not() -> None:
    dialect = small_dialect(demo_template())
    ids = dialect.encode("<|im_start|><think>a</think><tool_call>b</tool_call><|im_end|>")
    assert dialect.decoder().feed(ids) == "<think>a</think><tool_call>b</tool_call>"
    assert "".join(map(dialect.token_text, ids)).startswith("<|im_start|><think>a")


def test_unfinished_character_ends_as_a_replacement() -> None:
    dialect = small_dialect(demo_template())
    euro = [token for byte in "€".encode()[:2] for token in [dialect_id(byte)]]
    decoder = dialect.decoder()
    assert decoder.feed(euro) == ""
    assert decoder.finish() == "\ufffd"
    assert dialect.decoder().feed([1 << 40, -1]) == ""


def dialect_id(byte: int) -> int:
    """The token of one byte in the small vocabulary."""
    character = next(character for character, value in byte_alphabet().items() if value == byte)
    found = Tokenizer.from_file(str(SMALL / "tokenizer.json")).token_to_id(character)
    assert found is not None
    return int(found)


def sentencepiece(folder: Path, prepend: str) -> Path:
    """A vocabulary of Mixtral's kind: pieces with U+2581 for a space, unknown bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"Helowrd.", "[INST]"]
    tokenizer = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in ("<unk>", "<s>", "</s>", "[INST]")])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("prepend", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize("text", ["<s>[INST] Hello wor[INST]Held</s>", "Hello é€😀 world", " Hello", "<s> led"])
def test_sentencepiece_vocabularies(prepend: str, text: str, tmp_path: Path) -> None:
    """Encoding in pieces as the library's in one; decoding in pieces as the library's at once."""
    path = sentencepiece(tmp_path, prepend)
    reference = library(path)
    codec = TokenCodec(path, "")
    ids = reference.encode(text, add_special_tokens=False).ids
    assert codec.encode(text) == ids
    assert "".join(in_pieces(codec, ids, 1)) == reference.decode(ids, skip_special_tokens=True)


def test_tokens_that_swallow_spaces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|l|>", lstrip=True), AddedToken("<|r|>", rstrip=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in ("a  <|l|>  b", "a  <|r|> \n b", " <|r|>  <|l|> ", "<|l|><|r|>"):
        assert TokenCodec(tmp_path / "tokenizer.json", "").encode(text) == tokenizer.encode(text).ids


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', "\x00\xff"])
def test_unusable_tokenizer_is_said(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TokenCodec(tmp_path / "tokenizer.json", "")


def test_missing_tokenizer_and_other_decoders_are_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        TokenCodec(tmp_path / "tokenizer.json", "")
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decodes by WordPiece"):
        TokenCodec(tmp_path / "tokenizer.json", "")
