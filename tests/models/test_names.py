"""One model, every way in which checkpoints name and lay out its tensors: the logits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ftengine.errors import CheckpointError
from tests.models import driver, tiny

Tensors = dict[str, torch.Tensor]
PROMPT = list(range(5, 45))


def in_language_model(tensors: Tensors) -> Tensors:
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    extra = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.layers.0.norm.weight": torch.ones(4)}
    return {**moved, **extra}


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_rotary_table(tensors: Tensors) -> Tensors:
    return {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}


VARIANTS: dict[str, Callable[[Tensors], Tensors]] = {
    "fused": tiny.fused,
    "fused, transposed": lambda tensors: tiny.fused(tensors, transposed=True),
    "language_model prefix": in_language_model,
    "fused, language_model prefix": lambda tensors: in_language_model(tiny.fused(tensors)),
    "no prefix": without_prefix,
    "old rotary table": with_rotary_table,
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_naming_gives_the_same_logits(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, kind: str, variant: str
) -> None:
    """Against the checkpoint as transformers 5 saves it: per expert, under `model.`; bit for bit."""
    plain = driver.prefill_logits(driver.load_model(checkpoint_of(kind)), PROMPT)
    folder = tiny.rewrite(checkpoint_of(kind), tmp_path / "variant", VARIANTS[variant])
    assert torch.equal(driver.prefill_logits(driver.load_model(folder), PROMPT), plain)


@pytest.mark.parametrize("sizes", [(64, 32), (64, 64)], ids=["2I = H", "I = H"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_fused_layout_is_told_where_one_shape_alone_would_not_do(
    tmp_path: Path, sizes: tuple[int, int], transposed: bool
) -> None:
    """Against the per-expert form of the same checkpoint."""
    hidden, intermediate = sizes
    source = tiny.write("mixtral", tmp_path / "plain", hidden_size=hidden, intermediate_size=intermediate)
    folder = tiny.rewrite(source, tmp_path / "fused", lambda tensors: tiny.fused(tensors, transposed=transposed))
    plain = driver.prefill_logits(driver.load_model(source), PROMPT)
    assert torch.equal(driver.prefill_logits(driver.load_model(folder), PROMPT), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_disk_equals_transformers_in_float32(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Against transformers, which widens the same stored numbers."""
    folder = tiny.rewrite(
        checkpoint_of("qwen3.5"), tmp_path / "half", lambda tensors: {n: t.to(dtype) for n, t in tensors.items()}
    )
    found = driver.compare_with_transformers(folder, PROMPT)
    assert found.logit_difference < 1e-3
    assert found.routes_equal


def test_shards_give_the_same_logits(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Three shards with an index, the tensors dealt out in turn; against the single file."""
    source, folder = checkpoint_of("qwen3"), tmp_path / "sharded"
    tiny.rewrite(source, folder, lambda tensors: tensors)
    (folder / "model.safetensors").unlink()
    tensors = load_file(source / "model.safetensors")
    tiny.write_shards(folder, tensors, 3)
    plain = driver.prefill_logits(driver.load_model(source), PROMPT)
    assert torch.equal(driver.prefill_logits(driver.load_model(folder), PROMPT), plain)


def test_an_embedding_is_the_head_where_they_are_tied(tmp_path: Path) -> None:
    """The tied checkpoint has no lm_head; without the tie, its absence is an error that names it."""
    folder = tiny.write("mixtral-window-tied", tmp_path / "tied")
    assert driver.compare_with_transformers(folder, PROMPT).logit_difference < 1e-3
    tiny.change_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        driver.load_model(folder)


def _drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def _with(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


FAULTS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "model.layers.1.mlp.experts.5.up_proj.weight is of another shape": (
        r"experts\.5\.up_proj\.weight has shape \[48, 63\], expected \[48, 64\]",
        _with("model.layers.1.mlp.experts.5.up_proj.weight", torch.zeros(48, 63)),
    ),
    "an expert is missing": (
        r"layers\.0\.mlp\.experts\.7\.down_proj\.weight is missing",
        _drop("model.layers.0.mlp.experts.7.down_proj.weight"),
    ),
    "a norm is missing": (r"layers\.2\.input_layernorm\.weight", _drop("model.layers.2.input_layernorm.weight")),
    "a bias too many": (
        r"layers\.0\.self_attn\.q_proj\.bias has no place",
        _with("model.layers.0.self_attn.q_proj.bias", torch.zeros(96)),
    ),
    "an expert too many": (r"experts\.8\.", _with("model.layers.0.mlp.experts.8.up_proj.weight", torch.zeros(48, 64))),
    "whole numbers": (
        r"model\.norm\.weight is I32",
        _with("model.norm.weight", torch.zeros(64, dtype=torch.int32)),
    ),
    "one tensor under two names": (
        "are the same one",
        _with("model.language_model.norm.weight", torch.zeros(64)),
    ),
    "fused, one missing": (
        r"experts\.down_proj is missing",
        lambda tensors: _drop("model.layers.0.mlp.experts.down_proj")(tiny.fused(tensors)),
    ),
    "fused, one transposed": (
        r"experts\.gate_up_proj .* are not one layer's experts",
        lambda tensors: {
            name: tensor.transpose(1, 2) if name.endswith("gate_up_proj") else tensor
            for name, tensor in tiny.fused(tensors).items()
        },
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_fit_is_named(checkpoint_of: Callable[[str], Path], tmp_path: Path, fault: str) -> None:
    pattern, change = FAULTS[fault]
    folder = tiny.rewrite(checkpoint_of("qwen3"), tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=pattern):
        driver.load_model(folder)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("hidden_size", {"hidden_size": None}),
        ("hidden_size", {"hidden_size": "64"}),
        ("num_hidden_layers", {"num_hidden_layers": 10**9}),
        ("num_attention_heads|do not divide", {"num_attention_heads": 5}),
        ("activation", {"hidden_act": "gelu"}),
        ("is quantized with", {"quantization_config": {"quant_method": "awq"}}),
        ("9 of 8 experts", {"num_experts_per_tok": 9}),
        ("rotary embedding of the kind 'longrope'", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}),
        ("rotary", {"rope_parameters": {"rope_theta": -1.0}}),
        (r"mlp\.gate\.weight has shape", {"num_local_experts": 1 << 16}),
        ("has shape .* 1073741824", {"hidden_size": 1 << 30}),
        (r"up_proj\.weight has shape|gate_proj\.weight has shape", {"moe_intermediate_size": 1 << 30}),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, pattern: str, changes: dict[str, object]
) -> None:
    """Before memory is taken for what it claims."""
    folder = tiny.rewrite(checkpoint_of("qwen3"), tmp_path / "refused", lambda tensors: tensors)
    tiny.change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=pattern):
        driver.load_model(folder)
