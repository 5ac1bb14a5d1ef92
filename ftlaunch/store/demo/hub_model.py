"""The dense model as the Hugging Face Hub has it: BF16 safetensors of the architecture `LlamaForCausalLM`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ftengine.errors import CheckpointError
from ftlaunch.store.demo.dense import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class HubModel:
    def __init__(self, directory: Path, origin: str) -> None:
        """Raises CheckpointError when the directory holds anything but such a model."""
        from ftengine.weights.checkpoint import Checkpoint

        checkpoint = Checkpoint.open(directory)
        if checkpoint.architecture != "LlamaForCausalLM":
            raise CheckpointError(f"{directory} holds a {checkpoint.architecture}, not a LlamaForCausalLM")
        self._tensors = checkpoint.tensors()
        self._directory = directory
        self.origin = origin
        config = checkpoint.config
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        rope = config.get("rope_parameters") or {}
        self.shape = Shape(
            vocabulary=checkpoint.vocab_size,
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or hidden // heads),
            context=checkpoint.max_context,
            rope_theta=float(config.get("rope_theta") or rope["rope_theta"]),
            norm_eps=float(config["rms_norm_eps"]),
        )

    def tensor(self, name: str) -> NDArray[np.float32]:
        import numpy as np

        from ftlaunch.store.safetensors_writer import from_bf16

        entry = self._tensors.get(name)
        if entry is None or entry.dtype != "BF16":
            raise CheckpointError(f"{self._directory} has no BF16 tensor {name}")
        bits = np.fromfile(entry.file, dtype=np.uint16, count=entry.nbytes // 2, offset=entry.start)
        return from_bf16(bits).reshape(entry.shape)

    def write_tokenizer(self, path: Path) -> None:
        shutil.copyfile(self._directory / "tokenizer.json", path)
