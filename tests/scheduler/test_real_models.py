"""Tiny random checkpoints of real architectures through the real process, against transformers' own greedy tokens."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from ftengine import wire
from tests.scheduler.spawn import EngineProcess, tokens

VOCABULARY = 96
COUNT = 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # large: the likeliest token stands out from rounding
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DELTA_NET = {
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}


def _model(architecture: str):
    import transformers

    torch.manual_seed(8)
    if architecture == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**COMMON, intermediate_size=32))
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**COMMON, **DELTA_NET))


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _reference(model, prompt: list[int], count: int) -> list[int]:
    """Greedy, the whole sequence computed anew for each token: nothing cached on this side either."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_5_moe"])
def test_same_tokens_alone_batched_chunked_reused_and_after_cancellation(architecture: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about optional kernels
        model = _model(architecture).float().eval()
        model.save_pretrained(tmp_path)
        prompts = {f"p{index}": _prompt(length, index) for index, length in enumerate((3, 16, 70, 131, 33))}
        expected = {name: _reference(model, prompt, COUNT) for name, prompt in prompts.items()}
        turn = prompts["p2"] + expected["p2"] + _prompt(9, 50)
        expected_turn = _reference(model, turn, COUNT)
        long = _prompt(200, 60)
        expected_long = _reference(model, long, 6)
    with EngineProcess(tmp_path, plugins="", dtype="float32", prefill_chunk=32, max_running_requests=4) as engine:
        ready = engine.start()
        assert isinstance(ready, wire.Ready), ready
        for name, prompt in prompts.items():
            assert engine.generate(prompt, COUNT, name=f"alone {name}") == expected[name]
        for name, prompt in prompts.items():
            engine.submit(name, prompt, COUNT)
        together = engine.collect(*prompts)
        for name in prompts:
            assert tokens(together[name]) == expected[name]
        assert together["p3"][-1].cached_tokens == 130
        engine.submit("turn", turn, COUNT)
        said = engine.collect("turn")["turn"]
        assert said[0].cached_tokens == 70 + COUNT - 1  # prompt and answer, but for its last token
        assert tokens(said) == expected_turn
        engine.submit("gone", long, 100)
        engine.receive()  # admitted: it is somewhere in its prompt
        engine.send(wire.Cancel("gone"))
        engine.collect("gone")
        assert engine.generate(long, 6, name="after") == expected_long
        assert engine.stats()["requests"]["running"] == 0
        engine.send(wire.Shutdown())
        engine.wait(10)
        assert "books are wrong" not in engine.process.stderr.read()
