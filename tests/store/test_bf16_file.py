"""The streaming writer against torch's rounding and the safetensors library's reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from ftlaunch.store.safetensors_writer import from_bf16, to_bf16, write_bf16

LARGEST = float(torch.finfo(torch.bfloat16).max)
FINITE = st.floats(width=32, allow_nan=False, min_value=-LARGEST, max_value=LARGEST)


@given(hnp.arrays(np.float32, st.integers(1, 64), elements=FINITE))
def test_rounding_equals_torch(values: np.ndarray) -> None:
    reference = torch.from_numpy(values).bfloat16()
    ours = torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.view(torch.int16), reference.view(torch.int16))
    assert np.array_equal(from_bf16(to_bf16(values)), reference.float().numpy())


def test_halfway_values_go_to_even() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], dtype=np.uint32).view(np.float32)
    assert to_bf16(halfway).tolist() == [0x3F80, 0x3F82]


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    tensors = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in (("b", (3, 5)), ("a", (7,)), ("ünï", (2, 2, 2)))
    }
    path = tmp_path / "model.safetensors"
    shapes = {name: values.shape for name, values in tensors.items()}
    written = list(write_bf16(path, shapes, iter(tensors.items())))
    assert written[-1] == path.stat().st_size
    assert written == sorted(written)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, values in tensors.items():
        assert torch.equal(loaded[name], torch.from_numpy(values).bfloat16())


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", np.zeros((2, 3), np.float32))],
        [("b", np.zeros(4, np.float32))],
        [("a", np.zeros((2, 2), np.float32))],
        [("a", np.zeros((2, 2), np.float32)), ("b", np.zeros(4, np.float32)), ("c", np.zeros(1, np.float32))],
    ],
    ids=["wrong shape", "wrong order", "too few", "too many"],
)
def test_tensors_that_the_header_does_not_announce(tmp_path: Path, tensors: list[tuple[str, np.ndarray]]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        list(write_bf16(tmp_path / "x", {"a": (2, 2), "b": (4,)}, iter(tensors)))
