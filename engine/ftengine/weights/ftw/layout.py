"""What an FTW header says, as plain structs, and the sizes that follow from it. `header.py` reads and checks them.

Torch-free. A section is a run of bytes of one data file that begins at a multiple of SECTION_ALIGN, is filled up with
zeros to the next one, and has a hash: one for a tensor, one for each expert block. Sections cover every data file
without gap or overlap.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from ftengine.formats.format import BY_NUMBER, EXPERT_ALIGN, ExpertLayout, Format, aligned

VERSION = 1
HEADER_FILE = "ftw.json"
SECTION_ALIGN = EXPERT_ALIGN  # direct I/O wants it for every section, not only for experts

MAX_FILE_BYTES = 1 << 48

Text = Annotated[str, msgspec.Meta(max_length=512)]
Hash = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]  # sha256, lower-case hexadecimal
Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
FileNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
FormatNumber = Annotated[int, msgspec.Meta(ge=0, le=255)]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was converted. revision: a commit of the Hub, a file's hash, or empty where nobody knows one."""

    name: Text
    revision: Text = ""
    kind: Text = ""  # "safetensors", "gguf", "ftw"


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Text
    size: Offset


class TensorSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor outside the expert blocks. packed: in panel order; else row by row, F32, F16 or BF16."""

    name: Text
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(min_length=1, max_length=8)]
    format: FormatNumber
    packed: bool
    file: FileNumber
    offset: Offset
    sha256: Hash

    @property
    def number_format(self) -> Format:
        return BY_NUMBER[self.format]

    @property
    def nbytes(self) -> int:
        """Without what fills the section up."""
        if self.packed:
            return self.number_format.matrix_bytes(*self.shape)
        return math.prod(self.shape) * self.number_format.bits // 8

    @property
    def extent(self) -> int:
        """In the file, filled up."""
        return aligned(self.nbytes, SECTION_ALIGN)


class ExpertSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's experts: block e begins at offset + e * layout.block_bytes and has the hash sha256[e]."""

    layer: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    hidden: Extent
    intermediate: Extent
    gate_up: FormatNumber
    down: FormatNumber
    bias: bool
    file: FileNumber
    offset: Offset
    sha256: Annotated[tuple[Hash, ...], msgspec.Meta(min_length=1, max_length=1 << 16)]

    @property
    def experts(self) -> int:
        return len(self.sha256)

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(self.hidden, self.intermediate, BY_NUMBER[self.gate_up], BY_NUMBER[self.down], self.bias)

    @property
    def extent(self) -> int:
        return self.experts * self.layout.block_bytes


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file beside the data that serving needs: configuration, tokenizer, template."""

    name: Text
    size: Offset
    sha256: Hash


class QuantizationError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What quantizing did to one class of tensors, as relative errors |q - w| / |w| of whole matrices (Frobenius)."""

    part: Text  # "experts", "attention", "embedding", ...
    format: FormatNumber
    matrices: Annotated[int, msgspec.Meta(ge=1)]
    mean: Annotated[float, msgspec.Meta(ge=0)]
    worst: Annotated[float, msgspec.Meta(ge=0)]
    worst_matrix: Text = ""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1)]
    architecture: Text
    origin: Origin
    files: Annotated[tuple[DataFile, ...], msgspec.Meta(max_length=1 << 12)]
    tensors: Annotated[tuple[TensorSection, ...], msgspec.Meta(max_length=1 << 17)]
    experts: Annotated[tuple[ExpertSection, ...], msgspec.Meta(max_length=1 << 12)]
    attachments: Annotated[tuple[Attachment, ...], msgspec.Meta(max_length=64)]
    quantization: Annotated[tuple[QuantizationError, ...], msgspec.Meta(max_length=256)] = ()

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def expert_bytes(self) -> int:
        return sum(section.extent for section in self.experts)

    @property
    def weight_bytes(self) -> int:
        """In memory, as the engine keeps them."""
        return self.dense_bytes + self.expert_bytes

    @property
    def parameters(self) -> int:
        experts = sum(3 * s.hidden * s.intermediate * s.experts for s in self.experts)
        return experts + sum(math.prod(tensor.shape) for tensor in self.tensors)
