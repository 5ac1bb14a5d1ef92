"""Carries a decoder's dense parts to the device, layer by layer as they are taken from where they are read."""

from __future__ import annotations

import torch

from ftengine.errors import ConfigError
from ftengine.experts.executor import HostExecutor
from ftengine.experts.pool import ExpertPool
from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.heads import Rope
from ftengine.kernels.triton.upload import stack, upload, upload_swiglu
from ftengine.layers.attention import Attention
from ftengine.layers.linear import Linear, SwiGlu
from ftengine.layers.moe import MoeLayer
from ftengine.layers.rms_norm import RmsNorm
from ftengine.models.base import ModelOptions
from ftengine.models.decoder import Decoder, DecoderLayer
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.weights import (
    DeviceAttention,
    DeviceDeltaNet,
    DeviceFeedForward,
    DeviceLayer,
    DeviceLinear,
    DeviceMoe,
    DeviceWeights,
)

ON_CPU = "ft serve --device cpu"


def torch_device(name: str) -> torch.device:
    """name: "cuda", or "interpret" for CPU tensors under Triton's interpreter. Raises ConfigError."""
    if name == "interpret":
        return torch.device("cpu")
    if name != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"there is no device {name!r} that torch can use here", ON_CPU)
    return torch.device("cuda", torch.cuda.current_device())


def _check_heads(size: int) -> None:
    """attention_decode's and attention_prefill's tiles. Raises ConfigError."""
    if size < 16 or size & (size - 1):
        raise ConfigError(
            f"attention heads of {size} dimensions are not computed on the GPU, only powers of two from 16 on", ON_CPU
        )


class Uploader:
    """dtype: of activations between kernels."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = torch_device(device)
        self._dtype = dtype
        self._layers: list[DeviceLayer] = []
        self._moe_layers: list[int] = []  # the model's numbers of them

    def add(self, layer: DecoderLayer) -> None:
        """Raises torch.OutOfMemoryError."""
        self._layers.append(DeviceLayer(self._mixer(layer), self._feed_forward(layer)))

    def decoder(self, host: Decoder, pool: ExpertPool, options: ModelOptions) -> GpuDecoder:
        """host: what lies around the layers; pool: the routed experts, which stay where they are."""
        embedding = upload((host.embedding.matrix,), self._device)
        tied = host.head.parts[0] is host.embedding.matrix
        weights = DeviceWeights(
            device=self._device,
            dtype=self._dtype,
            layers=tuple(self._layers),
            embedding=embedding[0],
            norm=self._norm(host.norm),
            head=DeviceLinear(embedding) if tied else self._linear(host.head),
            rope=Rope(host.rotary.frequencies.to(self._device), host.rotary.attention_factor),
            window=host.window or 0,
        )
        banks = {index: pool.bank(layer) for index, layer in enumerate(self._moe_layers)}
        return GpuDecoder(
            vocab_size=host.vocab_size,
            max_context=host.max_context,
            eos_token_ids=host.eos_token_ids,
            cache_layout=host.cache_layout,
            weights=weights,
            banks=banks,
        )

    def _mixer(self, layer: DecoderLayer) -> DeviceAttention | DeviceDeltaNet:
        norm, mixer = self._norm(layer.mixer_norm), layer.mixer
        if isinstance(mixer, Attention):
            _check_heads(mixer.head_dim)
            return DeviceAttention(
                norm=norm,
                cache_index=layer.cache_index,
                qkv=self._linear(mixer.qkv),
                out=self._linear(mixer.out),
                head_norm=None if mixer.norm is None else self._norm(mixer.norm),
                heads=mixer.heads,
                kv_heads=mixer.kv_heads,
                head_dim=mixer.head_dim,
                gated=mixer.gated,
            )
        return DeviceDeltaNet(
            norm=norm,
            cache_index=layer.cache_index,
            shape=mixer.shape,
            projection=self._linear(mixer.projection),
            core=DeltaNet(
                mixer.taps.to(self._device),
                mixer.decay_scale.to(self._device),
                mixer.decay_bias.to(self._device),
                mixer.norm.weight.to(self._device),
                mixer.norm.epsilon,
            ),
            out=self._linear(mixer.out),
        )

    def _feed_forward(self, layer: DecoderLayer) -> DeviceMoe | DeviceFeedForward:
        norm, found = self._norm(layer.feed_forward_norm), layer.feed_forward
        if isinstance(found, SwiGlu):
            return DeviceFeedForward(norm, upload_swiglu(found.bank, self._device))
        assert isinstance(found, MoeLayer)
        assert isinstance(found.executor, HostExecutor)
        router, layout = found.router, found.executor.pool.bank(found.router.layer).layout
        if layout.bias or layout.hidden % 2 or layout.intermediate % 2:
            raise ConfigError("experts with biases or of an odd size are not computed on the GPU", ON_CPU)
        self._moe_layers.append(router.layer)
        parts, down = upload(router.linear.parts, self._device), None
        if found.shared is not None:
            shared = upload_swiglu(found.shared.bank, self._device)
            parts, down = stack((*parts, shared.gate_up)), shared.down
        return DeviceMoe(
            norm=norm,
            index=len(self._moe_layers) - 1,
            projection=DeviceLinear(parts),
            experts=router.experts,
            top_k=router.top_k,
            normalize=router.normalize,
            gated=router.linear.rows > router.experts,
            layout=layout,
            shared_down=down,
        )

    def _linear(self, linear: Linear) -> DeviceLinear:
        bias = None if linear.bias is None else linear.bias.to(self._device)
        return DeviceLinear(upload(linear.parts, self._device), bias)

    def _norm(self, norm: RmsNorm) -> RmsNorm:
        return RmsNorm(norm.weight.to(self._device), norm.epsilon, norm.dtype)
