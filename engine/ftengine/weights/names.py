"""Tensor names on disk -> canonical ones: `embed_tokens.weight`, `layers.N.…`, `norm.weight`, `lm_head.weight`."""

from __future__ import annotations

import re

LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# A vision tower, multi-token-prediction layers, and a table that old checkpoints kept though it is computed.
IGNORED_PREFIXES = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.multi_modal_projector."),
    *("mtp.", "model.mtp.", "model.language_model.mtp."),
)
IGNORED_SUFFIX = "rotary_emb.inv_freq"

MIXTRAL_PROJECTION = re.compile(r"(\.experts\.\d+)\.(w[123])\.")
MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def canonical(name: str) -> str | None:
    """None for tensors that a text decoder has no use for."""
    if name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIX):
        return None
    for prefix in LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    name = name.replace(".block_sparse_moe.", ".mlp.", 1)
    return MIXTRAL_PROJECTION.sub(lambda match: f"{match[1]}.{MIXTRAL_NAMES[match[2]]}.", name)
