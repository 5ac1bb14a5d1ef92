"""A model of random weights in a shape of its own making, straight into memory: for measuring, never for serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ftengine.bench.shapes import QWEN36
from ftengine.formats.format import NVFP4, PANEL_ROWS, ExpertLayout, Format, padded, panels
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.models.base import Model, ModelOptions, load
from ftengine.weights.buffer import host_buffer
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.files import FolderFiles
from ftengine.weights.source import TensorFacts

STANDARD_DEVIATION = 0.02
RANDOM_BYTES = 64 << 20  # that are drawn; weights are runs of them, each beginning elsewhere
NVFP4_ONE = 0x38  # 1.0 as an e4m3 byte
NVFP4_DEVIATION = 2.9  # of uniformly random e2m1 codes


def synthetic_model(
    layers: int,
    dtype: str,
    format: Format = NVFP4,
    config: dict[str, Any] = QWEN36,
    *,
    dense: Format | None = None,
    device: str = "cpu",
) -> Model:
    """The first `layers` layers of the shape. format: of routed experts, and of every matrix without `dense`.

    NVFP4 or BF16.
    """
    config = {**config, "num_hidden_layers": layers}
    folder = Path("synthetic")
    checkpoint = Checkpoint(folder, config, FolderFiles(folder))
    source = SyntheticSource(config, format, dense)
    return load(checkpoint, ModelOptions(dtype=dtype, device=device, source=source))


class SyntheticSource:
    """WeightSource of random weights of Qwen3.5's tensors. The same in every process that asks in the same order."""

    def __init__(self, config: dict[str, Any], format: Format, dense: Format | None = None) -> None:
        self._format = format
        self._dense = dense or format
        self._config = config
        self._shapes = dict(_shapes(config))
        self._generator = torch.Generator().manual_seed(0)
        words = torch.empty(RANDOM_BYTES // 8, dtype=torch.int64)
        self._bits = words.random_(-(1 << 63), None, generator=self._generator).view(torch.uint8)
        normal = torch.randn(RANDOM_BYTES // 2, generator=self._generator).mul_(STANDARD_DEVIATION)
        self._numbers = normal.bfloat16().view(torch.uint8)
        self._at = 0

    def tensors(self) -> dict[str, TensorFacts]:
        return {name: TensorFacts(shape, self._dense, 1) for name, shape in self._shapes.items()}

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith("conv1d.weight"):
            return torch.randn(shape, generator=self._generator).mul_(0.3).to(dtype)
        if name.endswith("A_log"):
            return torch.randn(shape, generator=self._generator).to(dtype)
        # Norms of the layers are stored as w of (1 + w), this one as it is.
        return torch.full(shape, float(name.endswith("linear_attn.norm.weight")), dtype=dtype)

    def matrix(self, name: str) -> QuantMatrix | PackedMatrix:
        rows, columns = self._shapes[name]
        data = host_buffer(self._dense.matrix_bytes(rows, columns)).view(panels(rows), -1)
        self._fill(data, columns, self._dense)
        return PackedMatrix(self._dense, rows, columns, data.flatten())

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        config = self._config
        return ExpertLayout(config["hidden_size"], config["moe_intermediate_size"], self._format, self._format)

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        layout = self.expert_layout(layer)
        assert layout is not None
        for block in out:
            self._fill(
                block[: layout.down_offset].view(2 * panels(layout.intermediate), -1), layout.hidden, self._format
            )
            down = block[layout.down_offset : layout.bias_offset]
            self._fill(down.view(panels(layout.hidden), -1), layout.intermediate, self._format)

    def _fill(self, data: torch.Tensor, columns: int, format: Format) -> None:
        """data: uint8 [panels, panel_bytes]."""
        codes = format.code_bytes(columns)
        self._draw(data[:, :codes], self._bits if format is NVFP4 else self._numbers)
        if format is not NVFP4:
            return
        groups = codes + padded(columns) // 16 * PANEL_ROWS
        data[:, codes:groups] = NVFP4_ONE
        scales = torch.full((len(data), PANEL_ROWS), STANDARD_DEVIATION / NVFP4_DEVIATION)
        data[:, groups : groups + 4 * PANEL_ROWS] = scales.view(torch.uint8)
        data[:, groups + 4 * PANEL_ROWS :] = 0

    def _draw(self, out: torch.Tensor, random: torch.Tensor) -> None:
        """out: uint8 [n, width]. A run starts somewhere else each time, at a multiple of 64."""
        rows = max(1, RANDOM_BYTES // 2 // out.shape[1])
        for part in torch.split(out, rows):
            self._at = (self._at + 64 * 10007) % (RANDOM_BYTES - part.numel())
            part.copy_(random[self._at : self._at + part.numel()].view(part.shape))

    def __enter__(self) -> SyntheticSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical names and shapes of all tensors but the routed experts."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "embed_tokens.weight", (vocabulary, hidden)
    yield "lm_head.weight", (vocabulary, hidden)
    yield "norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        full = (layer + 1) % config["full_attention_interval"] == 0
        mixer: Callable[[dict[str, Any]], Iterator[tuple[str, tuple[int, ...]]]] = _attention if full else _delta_net
        for name, shape in (*mixer(config), *_feed_forward(config)):
            yield f"layers.{layer}.{name}", shape


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    rows = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys}
    yield from ((f"self_attn.{name}.weight", (count, hidden)) for name, count in rows.items())
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "self_attn.q_norm.weight", (size,)
    yield "self_attn.k_norm.weight", (size,)


def _delta_net(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    rows = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    yield from ((f"linear_attn.{name}.weight", (count, hidden)) for name, count in rows.items())
    yield "linear_attn.conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"])
    yield "linear_attn.norm.weight", (config["linear_value_head_dim"],)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _feed_forward(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, shared = config["hidden_size"], config["shared_expert_intermediate_size"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate.weight", (config["num_experts"], hidden)
    yield "mlp.shared_expert_gate.weight", (1, hidden)
    yield "mlp.shared_expert.gate_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.up_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.down_proj.weight", (hidden, shared)
