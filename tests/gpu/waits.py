"""Notices where the host waits for the device: values read back, and calls that wait for streams and events.

On Triton's interpreter device tensors lie in host memory as well: there every tensor counts as the device's unless its
memory is said to be the host's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ftengine

ENGINE = str(Path(ftengine.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
# These hand a tensor's memory out without an operation that a mode sees.
READERS = ("numpy", "tolist", "cpu", "__array__")
aten = torch.ops.aten
WAITING = {
    aten.item, aten.is_nonzero, aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal,
    aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.repeat_interleave, aten.bincount,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Waits:
    """`found` inside of `watched`: 'file:line in function, what', of calls that the engine's code makes.

    Calls of Triton's interpreter are its own: on a GPU there are none.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._host: set[int] = set()

    @contextmanager
    def watched(self, host: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """host: tensors in the host's memory, which may be read."""
        self._host = {tensor.untyped_storage().data_ptr() for tensor in host}
        with pytest.MonkeyPatch.context() as patch, _Operations(self):
            for name in READERS:
                patch.setattr(torch.Tensor, name, self._reader(name, getattr(torch.Tensor, name)))
            for owner, name in (
                (torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")
            ):  # fmt: skip
                patch.setattr(owner, name, self._waiter(f"{owner.__name__}.{name}"))
            yield

    def read(self, tensor: torch.Tensor, what: str) -> None:
        lies_here = tensor.device.type == "cpu"
        if lies_here and (torch.cuda.is_available() or tensor.untyped_storage().data_ptr() in self._host):
            return
        self.note(what)

    def note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(ENGINE):
            place = Path(frame.f_code.co_filename).relative_to(ENGINE)
            self.found.append(f"{place}:{frame.f_lineno} in {frame.f_code.co_name}, {what}")

    def _reader(self, name: str, original: Any) -> Any:
        def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.read(tensor, name)
            return original(tensor, *arguments, **options)

        return read

    def _waiter(self, name: str) -> Any:
        return lambda *arguments, **options: self.note(name)


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in WAITING:
            self.waits.read(args[0], packet.__name__)
        if packet in INDEXING:  # by a mask: how much comes out is known to the device
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.waits.read(index, packet.__name__)
        return func(*args, **(kwargs or {}))
