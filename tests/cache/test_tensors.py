from __future__ import annotations

import psutil
import pytest
import torch

from ftengine.cache.storage import Storage
from ftengine.cache.tensors import allocate_cache, kv_bytes_per_token, state_bytes
from ftengine.core import CacheLayout, StateSpec

STATES = ((StateSpec("s", (2, 3, 5), "float32"), StateSpec("conv", (7, 3), "bfloat16")),) * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_shapes_and_sizes_are_what_the_layout_says(dtype: str) -> None:
    """The byte counts that memory is planned with, against what the tensors themselves say."""
    layout = CacheLayout(kv_layers=4, kv_heads=2, head_dim=6, dtype=dtype, states=STATES)
    cache = allocate_cache(layout, pages=5, page_size=16, slots=3)
    assert [tuple(layer.shape) for layer in cache.keys + cache.values] == [(5 + 3, 16, 2, 6)] * 8
    assert {layer.dtype for layer in cache.keys + cache.values} == {getattr(torch, dtype)}
    assert sum(layer.nbytes for layer in cache.keys + cache.values) == kv_bytes_per_token(layout) * 8 * 16
    assert [{name: tuple(tensor.shape) for name, tensor in layer.items()} for layer in cache.states] == [
        {"s": (3, 2, 3, 5), "conv": (3, 7, 3)}
    ] * 3
    assert sum(tensor.nbytes for layer in cache.states for tensor in layer.values()) == state_bytes(layout) * 3
    assert not any(layer.any() for layer in cache.keys + cache.values)


def test_layers_do_not_share_memory() -> None:
    cache = allocate_cache(CacheLayout(2, 1, 4, "float32"), pages=2, page_size=2, slots=0)
    cache.keys[0].fill_(1)
    assert not cache.keys[1].any()
    assert not cache.values[0].any()
    assert cache.states == []


def test_memory_is_taken_when_written_not_when_allocated() -> None:
    layout = CacheLayout(kv_layers=4, kv_heads=8, head_dim=128, dtype="float32")
    before = psutil.Process().memory_info().rss
    cache = allocate_cache(layout, pages=1024, page_size=16, slots=0)  # 512 MiB
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert len(cache.keys) == 4


def test_a_device_has_a_page_and_a_slot_to_spare_and_states_side_by_side() -> None:
    """What is written through a layer's states is found in the tensors that hold all layers', and nowhere else."""
    layout = CacheLayout(kv_layers=2, kv_heads=2, head_dim=6, dtype="bfloat16", states=STATES)
    cache = allocate_cache(layout, pages=5, page_size=16, slots=3, device="interpret")
    assert [tuple(layer.shape) for layer in cache.keys + cache.values] == [(5 + 3 + 1, 16, 2, 6)] * 4
    assert [tuple(tensor.shape) for tensor in cache.joined] == [(3, 4, 2, 3, 5), (3, 4, 7, 3)]
    for number, layer in enumerate(cache.states):
        layer["s"].fill_(number + 1)
        layer["conv"].fill_(-number - 1)
    for tensor, sign in zip(cache.joined, (1, -1), strict=True):
        assert [sorted(set(layer.flatten().tolist())) for layer in tensor] == [[sign], [2 * sign], [3 * sign]]


@pytest.mark.parametrize("device", ["cpu", "interpret"])
def test_states_of_all_layers_are_copied_and_erased_together(device: str) -> None:
    layout = CacheLayout(kv_layers=1, kv_heads=1, head_dim=4, dtype="float32", states=STATES)
    tensors = allocate_cache(layout, pages=2, page_size=2, slots=3, device=device)
    storage = Storage(tensors, pages=2)
    everything = [tensor for layer in tensors.states for tensor in layer.values()]
    for number, tensor in enumerate(everything):
        for slot in range(3):
            tensor[slot] = 10 * number + slot
    storage.copy_state(2, 0)
    storage.erase_slot(1)
    for number, tensor in enumerate(everything):
        assert [set(tensor[slot].flatten().tolist()) for slot in range(3)] == [
            {10 * number + 2},
            {0},
            {10 * number + 2},
        ]


@pytest.mark.parametrize("device", ["cpu", "interpret"])
@pytest.mark.parametrize("copies", [[(1, 4)], [(0, 6), (1, 5), (0, 7)]])
def test_pages_are_copied_whole_in_all_layers(device: str, copies: list[tuple[int, int]]) -> None:
    layout = CacheLayout(kv_layers=3, kv_heads=2, head_dim=4, dtype="float32", states=STATES)
    tensors = allocate_cache(layout, pages=5, page_size=2, slots=3, device=device)
    storage = Storage(tensors, pages=5)
    layers = tensors.keys + tensors.values
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in layers]
    storage.copy_pages(copies)
    sources = {target: source for source, target in copies}
    for layer, old in zip(layers, before, strict=True):
        for page in range(len(layer)):
            assert layer[page].equal(old[sources.get(page, page)])
    assert [storage.companion(slot) for slot in range(3)] == [5, 6, 7]
    assert storage.page_bytes == kv_bytes_per_token(layout) * 2
    assert storage.state_bytes == state_bytes(layout)
