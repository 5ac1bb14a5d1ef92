"""Tensor names on disk -> canonical ones: `embed_tokens.weight`, `layers.N.…`, `norm.weight`, `lm_head.weight`."""

from __future__ import annotations

LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# A vision tower, multi-token-prediction layers, and a table that old checkpoints kept though it is computed.
IGNORED_PREFIXES = ("model.visual.", "visual.", "mtp.", "model.mtp.")
IGNORED_SUFFIX = "rotary_emb.inv_freq"


def canonical(name: str) -> str | None:
    """None for tensors that a text decoder has no use for."""
    if name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIX):
        return None
    for prefix in LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return name.replace(".block_sparse_moe.", ".mlp.", 1)
