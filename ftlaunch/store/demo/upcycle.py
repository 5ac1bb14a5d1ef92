"""Sparse upcycling: every feed-forward block of a dense Llama becomes four experts behind a router (Mixtral's form).

Method: Komatsuzaki et al., "Sparse Upcycling", https://arxiv.org/abs/2212.05055. The experts are the dense block with
each weight scaled by its own random factor, the router's rows are random. As the two chosen experts' weights sum to
one, the mixture stays near the dense block; the noise is as large as the model's answers bear, so that a wrong expert
changes the logits by far more than a numerical error does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftlaunch.store.demo.dense import Dense, Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EXPERTS = 4
CHOSEN = 2
SEED = 130  # with which the right answer leads clearly under every system prompt that was tried
EXPERT_NOISE = 0.17  # largest relative change of a weight; a tenth on average of squares
ROUTER_RANGE = 0.17  # largest router weight

# Mixtral's names of an expert's matrices
MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of the upcycled model by their Mixtral names, in the order of `tensors`."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        result[prefix + "input_layernorm.weight"] = (hidden,)
        result[prefix + "self_attn.q_proj.weight"] = (queries, hidden)
        result[prefix + "self_attn.k_proj.weight"] = (keys, hidden)
        result[prefix + "self_attn.v_proj.weight"] = (keys, hidden)
        result[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
        result[prefix + "post_attention_layernorm.weight"] = (hidden,)
        result[prefix + "block_sparse_moe.gate.weight"] = (EXPERTS, hidden)
        for expert in range(EXPERTS):
            for matrix in MATRICES:
                rows, columns = (hidden, shape.intermediate) if matrix == "w2" else (shape.intermediate, hidden)
                result[f"{prefix}block_sparse_moe.experts.{expert}.{matrix}.weight"] = (rows, columns)
    result["model.norm.weight"] = (hidden,)
    return result


def tensors(dense: Dense) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(name, values) of the upcycled model, one layer's dense block in memory at a time."""
    import numpy as np

    noise = Noise(SEED)
    block: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes(dense.shape).items():
        prefix, found, rest = name.partition("block_sparse_moe.")
        if not found:
            yield name, dense.tensor(name)
        elif rest == "gate.weight":
            block = {key: dense.tensor(f"{prefix}mlp.{matrix}.weight") for key, matrix in MATRICES.items()}
            yield name, noise.uniform(shape, ROUTER_RANGE)
        else:
            factor = noise.uniform(shape, EXPERT_NOISE)
            factor += np.float32(1)
            factor *= block[rest.split(".")[2]]
            yield name, factor


class Noise:
    """Uniform numbers from the Philox counter generator's raw bits, which no numpy release changes."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._bits = np.random.Philox(key=seed)

    def uniform(self, shape: tuple[int, ...], limit: float) -> NDArray[np.float32]:
        """In [-limit, limit), of 16 bits each."""
        import math

        import numpy as np

        count = math.prod(shape)
        values = self._bits.random_raw((count + 3) // 4).view(np.int16)[:count].astype(np.float32)
        values *= np.float32(limit / 32768)
        return values.reshape(shape)
