"""What headers and config.json tell of memory, against what a loaded model then says and holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftengine.cache.tensors import kv_bytes_per_token, state_bytes
from ftengine.memory import estimate
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source
from tests.models import driver, tiny

KINDS = ["mixtral", "mixtral-window-tied", "qwen3", "qwen3.5"]

# The shape of Qwen3.6-35B-A3B: 40 layers, every fourth with attention.
QWEN = {
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.write(request.param, tmp_path_factory.mktemp(request.param)))


def test_keys_values_and_states_are_those_of_the_loaded_model(checkpoint: Checkpoint) -> None:
    layout = driver.load_model(checkpoint.path, "bfloat16").cache_layout
    assert estimate.kv_bytes_per_token(checkpoint.text_config, "bfloat16") == kv_bytes_per_token(layout)
    assert estimate.state_bytes(checkpoint.text_config) == state_bytes(layout)


def test_experts_are_those_of_the_loaded_model(checkpoint: Checkpoint) -> None:
    """Number and block size, of experts that lie in the checkpoint as matrices."""
    with open_source(checkpoint) as source:
        sizes = estimate.weight_sizes(source, checkpoint.text_config)
    banks = {}
    for layer in driver.load_model(checkpoint.path, "bfloat16").layers:
        executor = getattr(layer.feed_forward, "executor", None)
        if executor is not None:
            banks.update(executor.pool.banks)
    assert sizes.layers == len(banks)
    assert {bank.experts for bank in banks.values()} == {sizes.experts}
    assert {bank.layout.block_bytes for bank in banks.values()} == {sizes.block}
    assert sum(bank.blocks.nbytes for bank in banks.values()) == sizes.banks
    assert sizes.total == sizes.layers * sizes.experts


def test_a_converted_model_is_of_the_same_size(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from ftlaunch.cli import main

    assert main(["checkpoint", "--model", str(checkpoint.path), "--out", str(tmp_path / "ftw")]) == 0
    converted = Checkpoint.open(tmp_path / "ftw")
    with open_source(checkpoint) as one, open_source(converted) as other:
        first = estimate.weight_sizes(one, checkpoint.text_config)
        second = estimate.weight_sizes(other, converted.text_config)
    assert (first.banks, first.block, first.total) == (second.banks, second.block, second.total)
    assert first.dense == second.dense


def test_the_shape_that_the_documentation_speaks_of() -> None:
    """Worked out by hand: 10 layers of 2 x 2 x 256 numbers of 2 bytes; 30 of [3, 8192] and [32, 128, 128] float32."""
    assert estimate.kv_bytes_per_token(QWEN, "bfloat16") == 20 * 1024
    assert estimate.state_bytes(QWEN) == 30 * 4 * (3 * 8192 + 32 * 128 * 128)
    assert estimate.experts_per_token(QWEN) == 8
    assert 200_000 < estimate.prefill_bytes_per_token(QWEN, "bfloat16") < 400_000
    assert 384 << 20 < estimate.decode_workspace(QWEN) < 528 << 20


def test_a_configuration_that_says_nothing() -> None:
    assert estimate.state_bytes({}) == estimate.experts_per_token({}) == 0
    assert estimate.prefill_bytes_per_token({}, "float32") >= 0
