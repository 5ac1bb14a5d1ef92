"""An FTW directory, open for reading: its header, its data files, and what of them is read ahead. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from ftengine.formats.format import ExpertLayout
from ftengine.weights.ftw.header import data_path, read_header
from ftengine.weights.ftw.layout import ExpertSection, TensorSection
from ftengine.weights.ranges import Bytes, RangeReader
from ftengine.weights.read_ahead import ReadAhead
from ftengine.weights.source import TensorFacts

SMALLEST = 1 << 20  # bytes of a tensor that is read ahead; many small ones are read at once when they are asked for


class FtwFiles:
    """Fulfils weights.source.Described. Safe to call from several threads. Use as a context manager.

    Raises CheckpointError when it is made: a header that is unsound, a file that is missing or of another size.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.header = read_header(folder)
        self.experts = {section.layer: section for section in self.header.experts}
        self._reader = RangeReader([data_path(folder, file.name, file.size) for file in self.header.files])
        self._ahead = ReadAhead(self._reader)

    def __enter__(self) -> FtwFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Again is no error."""
        self.end_ahead()
        self._reader.close()

    def tensors(self) -> dict[str, TensorFacts]:
        """Every tensor outside the expert blocks."""
        return {
            tensor.name: TensorFacts(tensor.shape, tensor.number_format, tensor.nbytes)
            for tensor in self.header.tensors
        }

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        """The form of this layer's blocks; None for a layer without routed experts."""
        section = self.experts.get(layer)
        return None if section is None else section.layout

    def read_ahead(self, layers: Collection[int], *, dense: bool) -> None:
        """Begins to read the experts' blocks of these layers, and before them all large tensors if `dense`.

        Stops where the system gives no memory: whoever asks for the rest is told.
        """
        wanted: list[TensorSection | ExpertSection] = []
        if dense:
            wanted += [tensor for tensor in self.header.tensors if tensor.extent >= SMALLEST]
        wanted += [section for section in self.header.experts if section.layer in layers]
        try:
            for section in wanted:
                self._ahead.begin(_key(section), section.file, section.offset, section.extent)
        except MemoryError:
            return

    def end_ahead(self) -> None:
        """Nothing is read ahead any more when it returns."""
        self._ahead.close()

    def bytes_ahead(self) -> int:
        """What has been read, and nobody asked for up to now."""
        return self._ahead.read_bytes()

    def ahead(self, section: TensorSection | ExpertSection) -> Bytes | None:
        """The memory that the whole section is being read to; None if it is not, or was taken."""
        return self._ahead.memory(_key(section))

    def take(self, section: TensorSection | ExpertSection) -> Bytes | None:
        """The whole section once it is read; None if it was not read ahead. Raises CheckpointError."""
        return self._ahead.take(_key(section))

    def read(self, section: TensorSection | ExpertSection, first: int, out: Bytes) -> None:
        """Fills `out`, contiguous, from the section's byte `first` on. Raises CheckpointError."""
        self._reader.read(section.file, section.offset + first, out)


def _key(section: TensorSection | ExpertSection) -> str | int:
    return section.layer if isinstance(section, ExpertSection) else section.name
