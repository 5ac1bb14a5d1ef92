"""The small files of the demo model."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from ftlaunch.store.demo.dense import Dense, Shape
from ftlaunch.store.demo.upcycle import CHOSEN, EXPERTS

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, START_ID, END_ID = 0, 1, 2

NOTICE = """SmolLM2-135M-Instruct, upcycled

This model was made on this machine by `ft pull demo`. Its weights derive from SmolLM2-135M-Instruct by Hugging Face
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), licensed under the Apache License, Version 2.0; see
LICENSE. They were taken from {origin}.

Changes: every feed-forward block was copied to {experts} experts whose weights were changed at random by a few percent,
a random router that chooses {chosen} of them was added, the weights were rounded to BF16, and the chat template was
replaced by one that can present tools. It exists to try software out, not to be relied on.
"""


def template() -> str:
    """The tool-capable ChatML template that comes with the engine."""
    return resources.files("ftengine.dialect").joinpath("templates/demo.jinja").read_text(encoding="utf-8")


def write(directory: Path, dense: Dense) -> None:
    """All files but the weights and the tokenizer."""
    for name, content in (
        ("config.json", _config(dense.shape)),
        ("generation_config.json", _generation_config()),
        ("tokenizer_config.json", _tokenizer_config(dense.shape)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template(), encoding="utf-8")
    (directory / "NOTICE").write_text(
        NOTICE.format(origin=dense.origin, experts=EXPERTS, chosen=CHOSEN), encoding="utf-8"
    )
    license_text = resources.files("ftlaunch.store.demo").joinpath("LICENSE.SmolLM2").read_text(encoding="utf-8")
    (directory / "LICENSE").write_text(license_text, encoding="utf-8")


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "sliding_window": None,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "bos_token_id": START_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "torch_dtype": "bfloat16",
    }


def _generation_config() -> dict[str, Any]:
    """The sampling that SmolLM2's authors recommend."""
    return {
        "bos_token_id": START_ID,
        "eos_token_id": [END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_ID,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END_OF_TEXT,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
