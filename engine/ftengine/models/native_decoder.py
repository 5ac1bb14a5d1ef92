"""A decoder's forward in one native call: csrc/decoder.h, over the packed weights of the Python layers."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from ftengine.core import Batch, CacheTensors
from ftengine.experts.executor import HostExecutor
from ftengine.experts.pool import ExpertBank
from ftengine.formats.matrix import PackedMatrix
from ftengine.kernels import native
from ftengine.layers.attention import Attention
from ftengine.layers.gated_delta_net import GatedDeltaNet
from ftengine.layers.linear import Linear, SwiGlu
from ftengine.layers.moe import MoeLayer
from ftengine.models.decoder import Decoder, DecoderLayer, FeedForward

SLICE_BYTES = 128 << 20  # of activations; a step that needs more goes through the layers in slices of its tokens


def native_decoder(decoder: Decoder, threads: int = 0) -> NativeDecoder | None:
    """None where there is no native library, or a part of the decoder that it does not know. threads: 0 for torch's."""
    known = all(_is_known(layer.feed_forward) for layer in decoder.layers)
    return NativeDecoder(decoder, threads or torch.get_num_threads()) if native.AVAILABLE and known else None


def _is_known(feed_forward: FeedForward) -> bool:
    if isinstance(feed_forward, MoeLayer):
        return isinstance(feed_forward.executor, HostExecutor)
    return isinstance(feed_forward, SwiGlu)


class NativeDecoder:
    """Points into the decoder's weights; nothing is copied. Buffers between steps are its own."""

    def __init__(self, decoder: Decoder, threads: int, slice_bytes: int = SLICE_BYTES) -> None:
        from ftengine import _native

        self._threads = threads
        self._vocab_size = decoder.vocab_size
        self._cache: CacheTensors | None = None
        self._native = _native.Decoder(
            decoder.norm.weight.numel(),
            decoder.vocab_size,
            str(decoder.norm.dtype).removeprefix("torch."),
            decoder.rotary.frequencies,
            decoder.rotary.attention_factor,
            slice_bytes,
        )
        for layer in decoder.layers:
            self._add_mixer(layer, decoder.window or 0)
            self._add_feed_forward(layer)
        head = decoder.head
        self._native.ends(_matrix(decoder.embedding.matrix), _parts(head), decoder.norm.weight, decoder.norm.epsilon)

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """See Model.forward."""
        if cache is not self._cache:
            windows, states = ([layer[name] for layer in cache.states] for name in ("window", "delta"))
            self._native.use_cache(cache.page_size, cache.keys, cache.values, windows, states)
            self._cache = cache
        logits = torch.empty(len(batch.logits_rows), self._vocab_size)
        # As numpy arrays, which cross in a tenth of the time that tensors take.
        self._native.forward(
            batch.input_ids.numpy(),
            batch.positions.numpy(),
            batch.query_lengths,
            batch.context_lengths,
            batch.page_table.numpy(),
            batch.slot_mapping.numpy(),
            batch.state_slots.numpy(),
            batch.logits_rows.numpy(),
            numpy.array([(one.row, one.tokens, one.slot) for one in batch.captures], dtype=numpy.int64).reshape(-1, 3),
            logits.numpy(),
            self._threads,
        )
        return logits

    def take_times(self) -> dict[str, float]:
        """Seconds of the forwards since the last call, by part of a step."""
        times: dict[str, float] = self._native.take_times()
        return times

    def _add_mixer(self, layer: DecoderLayer, window: int) -> None:
        norm, mixer = layer.mixer_norm, layer.mixer
        if isinstance(mixer, Attention):
            self._native.attention(
                norm=norm.weight,
                epsilon=norm.epsilon,
                projection=_parts(mixer.qkv),
                bias=mixer.qkv.bias,
                out=_parts(mixer.out),
                out_bias=mixer.out.bias,
                head_norm=None if mixer.norm is None else mixer.norm.weight,
                head_epsilon=0.0 if mixer.norm is None else mixer.norm.epsilon,
                heads=mixer.heads,
                kv_heads=mixer.kv_heads,
                head_dim=mixer.head_dim,
                gated=mixer.gated,
                window=window,
                scale=mixer.head_dim**-0.5,
            )
        else:
            self._add_delta_net(layer, mixer)

    def _add_delta_net(self, layer: DecoderLayer, mixer: GatedDeltaNet) -> None:
        shape = mixer.shape
        self._native.delta_net(
            norm=layer.mixer_norm.weight,
            epsilon=layer.mixer_norm.epsilon,
            projection=_parts(mixer.projection),
            out=_parts(mixer.out),
            taps=mixer.taps,
            decay_scale=mixer.decay_scale,
            decay_bias=mixer.decay_bias,
            core_norm=mixer.norm.weight,
            core_epsilon=mixer.norm.epsilon,
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            kernel=shape.kernel,
        )

    def _add_feed_forward(self, layer: DecoderLayer) -> None:
        norm, feed_forward = layer.feed_forward_norm, layer.feed_forward
        common = {"norm": norm.weight, "epsilon": norm.epsilon}
        if isinstance(feed_forward, SwiGlu):
            self._native.feed_forward(
                **common,
                router=[],
                top_k=0,
                normalize=False,
                experts=None,
                shared=_bank(feed_forward.bank),
                gated=False,
            )
            return
        assert isinstance(feed_forward, MoeLayer)
        assert isinstance(feed_forward.executor, HostExecutor)
        router, shared = feed_forward.router, feed_forward.shared
        self._native.feed_forward(
            **common,
            router=_parts(router.linear),
            top_k=router.top_k,
            normalize=router.normalize,
            experts=_bank(feed_forward.executor.pool.bank(router.layer)),
            shared=None if shared is None else _bank(shared.bank),
            gated=router.linear.rows > router.experts,
        )


def _matrix(matrix: PackedMatrix) -> tuple[Any, ...]:
    return matrix.format.number, matrix.rows, matrix.columns, matrix.data


def _parts(linear: Linear) -> list[tuple[Any, ...]]:
    return [_matrix(part) for part in linear.parts]


def _bank(bank: ExpertBank) -> tuple[Any, ...]:
    layout = bank.layout
    return bank.blocks, layout.hidden, layout.intermediate, layout.gate_up.number, layout.down.number, layout.bias
