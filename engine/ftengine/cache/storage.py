"""Copies and erases pages and states where the model computes: the numbers behind the books of pages and slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftengine.core import CacheTensors

if TYPE_CHECKING:
    import torch


class Storage:
    """Everything is queued on the device's current stream, after what was queued before."""

    def __init__(self, tensors: CacheTensors, pages: int) -> None:
        """pages: of the allocator; behind them lies the companion page of each slot."""
        self.tensors = tensors
        self.page_bytes = sum(layer[0].nbytes for layer in (*tensors.keys, *tensors.values))
        self.state_bytes = sum(state[0].nbytes for layer in tensors.states for state in layer.values())
        self._pages = pages

    def companion(self, slot: int) -> int:
        """The page for the keys and values of an anchor's tail."""
        return self._pages + slot

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """From one page to another, whole, over all layers. No page is written twice, none both read and written."""
        layers = (*self.tensors.keys, *self.tensors.values)
        if len(copies) > 1 and layers and layers[0].device.type != "cpu":
            # A launch for each layer, however many pages.
            sources, targets = _index(copies, layers[0].device)
            for layer in layers:
                layer.index_copy_(0, targets, layer.index_select(0, sources))
            return
        for source, target in copies:
            for layer in layers:
                layer[target].copy_(layer[source])

    def copy_state(self, source: int, target: int) -> None:
        for old, new in zip(self._states(source), self._states(target), strict=True):
            new.copy_(old)

    def erase_page(self, page: int) -> None:
        """NaN left in a page would enter a later sequence's attention through `0 * NaN`."""
        for layer in (*self.tensors.keys, *self.tensors.values):
            layer[page].zero_()

    def erase_slot(self, slot: int) -> None:
        """The state and the companion."""
        for state in self._states(slot):
            state.zero_()
        self.erase_page(self.companion(slot))

    def _states(self, slot: int) -> list[torch.Tensor]:
        """Views of one slot's states; as few as can be, since on a device each costs a launch."""
        if self.tensors.joined:
            return [tensor[:, slot] for tensor in self.tensors.joined]
        return [tensor[slot] for layer in self.tensors.states for tensor in layer.values()]


def _index(copies: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """[2, n] int64 on the device: sources and targets."""
    # Imported here: who only counts pages needs no torch.
    import torch

    numbers = torch.tensor(copies, dtype=torch.int64).T.contiguous()
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
