"""Headers: every flipped bit and every cut is found, and whatever a header claims is checked before it is believed."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftengine.errors import CheckpointError
from ftengine.weights.ftw.header import MAX_HEADER_BYTES, MIDDLE, PREFIX, SUFFIX, decode, read_header
from ftengine.weights.ftw.layout import HEADER_FILE

Header = dict[str, Any]


def sealed(raw: bytes) -> bytes:
    """With the right hash: what somebody means harm with."""
    return PREFIX + hashlib.sha256(raw).hexdigest().encode() + MIDDLE + raw + SUFFIX


def refuses(folder: Path) -> str:
    """What is said to do about it. In less than a second of processor time, and without the memory that a header
    claims."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_header(folder)
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    return caught.value.next_step


def test_two_hundred_flipped_bits(copy: Callable[[], Path]) -> None:
    folder, chance = copy(), random.Random(1)
    path = folder / HEADER_FILE
    sound = path.read_bytes()
    for _ in range(200):
        content = bytearray(sound)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        refuses(folder)
    path.write_bytes(sound)
    read_header(folder)


def test_cut_anywhere(copy: Callable[[], Path]) -> None:
    folder, chance = copy(), random.Random(2)
    path = folder / HEADER_FILE
    sound = path.read_bytes()
    for length in [*range(0, len(sound), 4096), *(chance.randrange(len(sound)) for _ in range(100)), len(sound) - 1]:
        path.write_bytes(sound[:length])
        refuses(folder)
    path.write_bytes(sound + b"\n")
    refuses(folder)


def change(*path: Any, to: Any) -> Callable[[Header], None]:
    def apply(header: Header) -> None:
        place: Any = header
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return apply


def drop(*path: Any) -> Callable[[Header], None]:
    def apply(header: Header) -> None:
        place: Any = header
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return apply


def overlap(header: Header) -> None:
    """The second section begins inside the first, which is larger than 4096 bytes."""
    first, second = header["tensors"][0], header["tensors"][1]
    assert first["file"] == 0
    assert 160 * 64 * 2 > 4096
    second["file"], second["offset"] = 0, first["offset"] + 4096


def repeat(field: str) -> Callable[[Header], None]:
    return lambda header: header[field].append(header[field][0])


HOSTILE: dict[str, Callable[[Header], None]] = {
    "version 2": change("version", to=2),
    "version 0": change("version", to=0),
    "no version": drop("version"),
    "an unknown field": change("surprise", to=1),
    "no files": change("files", to=[]),
    "a file of 2^63 bytes": change("files", 0, "size", to=1 << 63),
    "a negative size": change("files", 0, "size", to=-4096),
    "a size that is no number": change("files", 0, "size", to="4096"),
    "a fractional size": change("files", 0, "size", to=4096.5),
    "a path as a file name": change("files", 0, "name", to="../dense-00001.ftw"),
    "an absolute file name": change("files", 0, "name", to="/etc/passwd.ftw"),
    "a NUL in a file name": change("files", 0, "name", to="dense\0.ftw"),
    "a file named as the header": change("files", 0, "name", to=HEADER_FILE),
    "a long file name": change("files", 0, "name", to="d" * 300 + ".ftw"),
    "a file twice": repeat("files"),
    "a tensor twice": repeat("tensors"),
    "a layer twice": repeat("experts"),
    "an attachment twice": repeat("attachments"),
    "an attachment elsewhere": change("attachments", 0, "name", to="../config.json"),
    "an attachment that is data": change("attachments", 0, "name", to="experts-00001.ftw"),
    "a hidden attachment": change("attachments", 0, "name", to=".bashrc"),
    "an empty tensor name": change("tensors", 0, "name", to=""),
    "a tensor name with a line break": change("tensors", 0, "name", to="a\nb"),
    "a tensor name of 600 letters": change("tensors", 0, "name", to="n" * 600),
    "no shape": change("tensors", 0, "shape", to=[]),
    "a shape of zero": change("tensors", 0, "shape", to=[0, 160]),
    "a negative shape": change("tensors", 0, "shape", to=[-64, -160]),
    "a shape that overflows": change("tensors", 0, "shape", to=[1 << 31] * 8),
    "nine dimensions": change("tensors", 0, "shape", to=[1] * 9),
    "a shape of another size": change("tensors", 0, "shape", to=[6400, 160]),
    "packed and three-dimensional": change("tensors", 0, "shape", to=[64, 160, 1]),
    "format 9": change("tensors", 0, "format", to=9),
    "format 10^30": change("tensors", 0, "format", to=10**30),
    "row by row in NVFP4": change("tensors", 0, "packed", to=False)
    and (lambda header: header["tensors"][0].update(packed=False, format=5)),
    "a file number that is none": change("tensors", 0, "file", to=60_000),
    "a negative offset": change("tensors", 0, "offset", to=-4096),
    "an odd offset": change("tensors", 0, "offset", to=64),
    "an offset past the end": change("tensors", 0, "offset", to=1 << 47),
    "sections that overlap": overlap,
    "a gap": drop("tensors", 0),
    "a hash of another length": change("tensors", 0, "sha256", to="00"),
    "a hash that is none": change("tensors", 0, "sha256", to="g" * 64),
    "a hash in capitals": change("tensors", 0, "sha256", to="A" * 64),
    "no experts in a layer": change("experts", 0, "sha256", to=[]),
    "an expert without a hash": drop("experts", 0, "sha256", 0),
    "an expert's hash that is none": change("experts", 0, "sha256", 1, to="z" * 64),
    "a huge intermediate size": change("experts", 0, "intermediate", to=1 << 31),
    "an intermediate size of zero": change("experts", 0, "intermediate", to=0),
    "another format of down": change("experts", 0, "down", to=0),
    "an unknown format of gate": change("experts", 0, "gate_up", to=77),
    "biases that are not there": change("experts", 0, "hidden", to=100_000),
    "layer -1": change("experts", 0, "layer", to=-1),
    "tensors that are a map": change("tensors", to={}),
    "null": change("experts", to=None),
    "an infinite error": change("quantization", to=[{"part": "x", "format": 5, "matrices": 1, "mean": -1, "worst": 0}]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, copy: Callable[[], Path]) -> None:
    folder = copy()
    path = folder / HEADER_FILE
    content = path.read_bytes()
    header = json.loads(content)["header"]
    HOSTILE[name](header)
    path.write_bytes(sealed(json.dumps(header).encode()))
    assert "ft checkpoint" in refuses(folder)


RAW: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "not UTF-8": b'{"version": 1, "architecture": "\xff"}',
    "NaN": b'{"version": NaN}',
    "a number of 5,000 digits": b'{"version": ' + b"9" * 5000 + b"}",
    "nested 100,000 deep": b'{"version": 1, "files": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a million files": b'{"version": 1, "files": [' + b",".join([b"0"] * 1_000_000) + b"]}",
    "a million names": b'{"version": 1, "tensors": [' + b",".join([b'{"name": "a"}'] * 1_000_000) + b"]}",
}


@pytest.mark.parametrize("name", RAW)
def test_hostile_bytes(name: str, copy: Callable[[], Path]) -> None:
    folder = copy()
    (folder / HEADER_FILE).write_bytes(sealed(RAW[name]))
    refuses(folder)


def test_a_header_above_the_limit_is_not_read(copy: Callable[[], Path]) -> None:
    folder = copy()
    with (folder / HEADER_FILE).open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES + 1)
    refuses(folder)
    with (folder / HEADER_FILE).open("r+b") as file:
        file.truncate(1 << 40)
    refuses(folder)


def test_the_largest_models_fit(converted: Path) -> None:
    """100 layers of 1,024 experts: read in less than a second."""
    sound = json.loads((converted / HEADER_FILE).read_bytes())["header"]
    first = sound["experts"][0]
    block = 4096 * 40
    sections = []
    for layer in range(100):
        hashes = [f"{layer * 1024 + expert:064x}" for expert in range(1024)]
        sections.append({**first, "layer": layer, "file": 0, "offset": layer * 1024 * block, "sha256": hashes})
    from ftengine.formats.format import BY_NUMBER, ExpertLayout

    form = BY_NUMBER[first["gate_up"]]
    size = ExpertLayout(first["hidden"], first["intermediate"], form, form).block_bytes
    for layer, section in enumerate(sections):
        section["offset"] = layer * 1024 * size
    header = {
        **sound,
        "tensors": [],
        "attachments": [],
        "files": [{"name": "experts-00001.ftw", "size": 100 * 1024 * size}],
        "experts": sections,
    }
    content = sealed(json.dumps(header).encode())
    assert len(content) < MAX_HEADER_BYTES
    began = time.process_time()
    assert sum(section.experts for section in decode(content, Path(HEADER_FILE)).experts) == 102_400
    assert time.process_time() - began < 1


@pytest.mark.parametrize("kind", ["missing", "short", "long", "a directory", "a pipe", "a link out"])
def test_data_files_are_looked_at_when_a_model_is_opened(kind: str, copy: Callable[[], Path], tmp_path: Path) -> None:
    import os

    folder = copy()
    path = folder / "experts-00001.ftw"
    content = path.read_bytes()
    path.unlink()
    if kind == "short":
        path.write_bytes(content[:-1])
    elif kind == "long":
        path.write_bytes(content + b"\0")
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link out":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"experts-00001\.ftw"):
        read_header(folder)


def test_reading_a_header_loads_no_torch(converted: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys; from pathlib import Path; from ftengine.weights.ftw.header import read_header, is_ftw; "
        "import ftengine.weights.ftw.verify, ftengine.weights.convert.plan; "
        "header = read_header(Path(sys.argv[1])); assert header.parameters and header.weight_bytes; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(converted)], check=True)
