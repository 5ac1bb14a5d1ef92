"""Names of what the tiers keep: hashes over the whole path of tokens that leads to it.

Tokens are packed: int32, little-endian. A name is a place to look, never a proof: records carry their tokens, and those
are compared. Torch-free.
"""

from __future__ import annotations

import hashlib

from ftengine.cache.tiers.base import CHUNK_TOKENS, TOKEN_BYTES

KEY_BYTES = 16
ROOT_KEY = b"\0" * KEY_BYTES
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES  # of packed tokens


def chunk_key(parent: bytes, tokens: bytes) -> bytes:
    """tokens: the chunk's CHUNK_TOKENS tokens; parent: the key of the chunk before it, or ROOT_KEY."""
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


def anchor_key(parent: bytes, tail: bytes) -> bytes:
    """tail: the less than CHUNK_TOKENS tokens between the last full chunk's end and the anchor."""
    return hashlib.blake2b(parent + b"anchor" + tail, digest_size=KEY_BYTES).digest()


def common_tokens(left: bytes, right: bytes) -> int:
    """Length of the longest common prefix, in tokens."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # low tokens are equal, high ones are not
        middle = (low + high) // 2
        if left[low * TOKEN_BYTES : middle * TOKEN_BYTES] == right[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
