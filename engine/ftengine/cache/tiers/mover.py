"""Between the device's cache and flat bytes in host memory: keys and values of a run of tokens, the states of a slot.

Used by the tiers' thread only. On a GPU everything goes over a stream of its own, which waits for what was launched
before the transfer was asked for; where the cache lies in host memory, copies are plain ones by one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ftengine.cache.tiers.arena import Bytes
from ftengine.cache.tiers.bounce import Bounce
from ftengine.cache.tiers.pinning import PinnedWindows
from ftengine.cache.tiers.shape import RecordShape
from ftengine.core import CacheTensors

BOUNCE_BYTES = 16 << 20

Slots = npt.NDArray[np.int64]  # page * page_size + offset for each token of a run


class Mover(Protocol):
    def mark(self) -> Any:
        """Called from the step loop: a moment of the compute stream that later transfers wait for."""
        ...

    def begin(self, mark: Any) -> None: ...

    def save_tokens(self, slots: Slots, out: Bytes) -> None:
        """out: [parts, tokens, row] flat. In place after `finish`."""
        ...

    def save_state(self, slot: int, out: Bytes) -> None: ...

    def load_tokens(self, slots: Slots, source: Bytes, first: int, tokens: int) -> None:
        """Of `source`, a record of `tokens` tokens, those from `first` on, as many as there are slots."""
        ...

    def load_state(self, slot: int, source: Bytes) -> None: ...

    def finish(self) -> None:
        """Returns when all transfers are done."""
        ...

    def close(self) -> None: ...


def slots_of(pages: list[int], companion: int, tokens: int, page_size: int) -> Slots:
    """Where the first `tokens` tokens of a path lie; those after the last full page are in `companion` unless it is
    -1, in which case `pages` has a page for them, too."""
    full = tokens // page_size
    used = pages[: -(-tokens // page_size)] if companion < 0 else [*pages[:full], companion]
    numbers = np.asarray(used, np.int64)
    return (numbers[:, None] * page_size + np.arange(page_size, dtype=np.int64)).reshape(-1)[:tokens]


def make_mover(tensors: CacheTensors, shape: RecordShape, windows: PinnedWindows) -> Mover:
    parts = [part for pair in zip(tensors.keys, tensors.values, strict=True) for part in pair]
    states = [state for layer in tensors.states for state in layer.values()]
    for tensor in (*parts, *states):
        if tensor.device.type == "cuda":
            return CudaMover(parts, states, shape, windows)
    return HostMover(parts, states, shape, tensors.page_size)


class HostMover:
    """The cache lies in host memory: whole pages are copied, by one call for each tensor."""

    def __init__(
        self, parts: list[torch.Tensor], states: list[torch.Tensor], shape: RecordShape, page_size: int
    ) -> None:
        self._shape = shape
        self._page_size = page_size
        self._rows = [_flat(part, part.shape[0] * part.shape[1]) for part in parts]
        self._pages = [_flat(part, part.shape[0]) for part in parts]
        self._states = [_flat(state, state.shape[0]) for state in states]

    def mark(self) -> None:
        return None

    def begin(self, mark: None) -> None:
        pass

    def save_tokens(self, slots: Slots, out: Bytes) -> None:
        record = out.reshape(self._shape.parts, len(slots), self._shape.row_bytes)
        for run in _runs(slots, self._page_size):
            if run.pages is not None:
                for paged, own in zip(self._pages, record[:, run.begin : run.end], strict=True):
                    np.take(paged, run.pages, axis=0, out=own.reshape(len(run.pages), -1), mode="clip")
                continue
            for rows, own in zip(self._rows, record[:, run.begin : run.end], strict=True):
                np.copyto(own, rows[run.slot : run.slot + len(own)])

    def load_tokens(self, slots: Slots, source: Bytes, first: int, tokens: int) -> None:
        record = source.reshape(self._shape.parts, tokens, self._shape.row_bytes)[:, first:]
        for run in _runs(slots, self._page_size):
            if run.pages is not None:
                for paged, own in zip(self._pages, record[:, run.begin : run.end], strict=True):
                    paged[run.pages] = own.reshape(len(run.pages), -1)
                continue
            for rows, own in zip(self._rows, record[:, run.begin : run.end], strict=True):
                np.copyto(rows[run.slot : run.slot + len(own)], own)

    def save_state(self, slot: int, out: Bytes) -> None:
        begin = 0
        for state in self._states:
            np.copyto(out[begin : begin + state.shape[1]], state[slot])
            begin += state.shape[1]

    def load_state(self, slot: int, source: Bytes) -> None:
        begin = 0
        for state in self._states:
            np.copyto(state[slot], source[begin : begin + state.shape[1]])
            begin += state.shape[1]

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class CudaMover:
    """The cache lies on a GPU. Tokens are gathered in, and scattered from, a buffer of one chunk on the device."""

    def __init__(
        self, parts: list[torch.Tensor], states: list[torch.Tensor], shape: RecordShape, windows: PinnedWindows
    ) -> None:
        self._shape = shape
        self._windows = windows
        self._device = device = (parts or states)[0].device
        self._parts = [_words(part, part.shape[0] * part.shape[1]) for part in parts]
        self._states = [state.reshape(state.shape[0], -1).view(torch.uint8) for state in states]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._buffer = torch.empty(shape.chunk_bytes, dtype=torch.uint8, device=device)
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._bounce = Bounce(_pinned(BOUNCE_BYTES), self._wait)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, mark: torch.cuda.Event) -> None:
        self._bounce.drop()  # what a path left that failed
        self._stream.wait_event(mark)

    def save_tokens(self, slots: Slots, out: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            index = self._index(slots)
            rows = self._rows(len(slots))
            for part, own in zip(self._parts, rows, strict=True):
                torch.index_select(part, 0, index, out=own)
            self._save(self._buffer, out)

    def load_tokens(self, slots: Slots, source: Bytes, first: int, tokens: int) -> None:
        with torch.cuda.stream(self._stream):
            index = self._index(slots)
            self._load(source, self._buffer)
            rows = self._rows(tokens)
            for part, own in zip(self._parts, rows, strict=True):
                part.index_copy_(0, index, own[first : first + len(slots)])

    def save_state(self, slot: int, out: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            for state, own in self._each_state(out):
                self._save(state[slot], own)

    def load_state(self, slot: int, source: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            for state, own in self._each_state(source):
                self._load(own, state[slot])

    def finish(self) -> None:
        self._bounce.flush()

    def close(self) -> None:
        self._wait()
        self._bounce.drop()

    def _wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def _save(self, device: torch.Tensor, host: Bytes) -> None:
        """device: uint8, at least as long."""
        for part, piece in self._cut(device, host):
            if self._windows.direct(piece):
                torch.from_numpy(piece).copy_(part, non_blocking=True)
            else:
                self._bounce.save(part, piece)

    def _load(self, host: Bytes, device: torch.Tensor) -> None:
        for part, piece in self._cut(device, host):
            if self._windows.direct(piece):
                part.copy_(torch.from_numpy(piece), non_blocking=True)
            else:
                self._bounce.load(piece, part)

    def _index(self, slots: Slots) -> torch.Tensor:
        """From pinned memory of torch's own, which is not used again before the copy is done."""
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)

    def _rows(self, tokens: int) -> torch.Tensor:
        """[parts, tokens, words of a row] of the buffer."""
        used = self._buffer[: tokens * self._shape.token_bytes]
        return used.view(self._parts[0].dtype).view(self._shape.parts, tokens, -1)

    def _each_state(self, flat: Bytes) -> Iterator[tuple[torch.Tensor, Bytes]]:
        begin = 0
        for state in self._states:
            yield state, flat[begin : begin + state.shape[1]]
            begin += state.shape[1]

    def _cut(self, device: torch.Tensor, host: Bytes) -> Iterator[tuple[torch.Tensor, Bytes]]:
        """The same bytes on both sides, in pieces that can be copied by themselves. device: uint8, at least as long."""
        begin = 0
        for piece in self._windows.pieces(host):
            yield device[begin : begin + piece.size], piece
            begin += piece.size


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _flat(tensor: torch.Tensor, rows: int) -> Bytes:
    """[rows, bytes of a row], the tensor's own memory."""
    flat = tensor.detach().view(rows, -1).view(torch.uint8)
    return flat.numpy()


def _words(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, words of a row], in words as wide as can be: fewer of them for a kernel to move."""
    flat = tensor.detach().view(rows, -1)
    wide = flat.shape[1] * flat.element_size() % 8 == 0
    return flat.view(torch.int64) if wide else flat


class _Run(NamedTuple):
    """Tokens begin to end of a path: neighbours from `slot` on, or else whole pages anywhere."""

    begin: int
    end: int
    slot: int
    pages: Slots | None


def _runs(slots: Slots, page_size: int) -> Iterator[_Run]:
    """What comes before the first whole page, the whole pages, and the rest."""
    if not len(slots):
        return
    head = min(-int(slots[0]) % page_size, len(slots))
    end = head + (len(slots) - head) // page_size * page_size
    if head:
        yield _Run(0, head, int(slots[0]), None)
    if end > head:
        first = slots[head:end:page_size]
        together = bool((np.diff(first) == page_size).all())
        yield _Run(head, end, int(first[0]), None if together else first // page_size)
    if end < len(slots):
        yield _Run(end, len(slots), int(slots[end]), None)
