"""What a measurement holds for: how each field is told, with CUDA and without, and what counts as another."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ftengine.experts import profile_key
from ftengine.experts.profile_key import Key, driver_of, gpu_of, known, words
from ftengine.formats.format import FORMATS, ExpertLayout
from ftengine.kernels import native
from tests.experts.test_profile import KEY

# The first lines as NVIDIA's modules write them, the closed one and the open one
TOLD = {
    "570.86.10": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed Jan 29 00:00:00 UTC 2025\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\n",
    "550.54": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54  Thu Feb 22 00:00:00 UTC 2024\n",
}
LAYOUT = ExpertLayout(2048, 512, FORMATS["nvfp4"], FORMATS["bf16"])


@pytest.mark.parametrize(("version", "text"), TOLD.items())
def test_the_driver_tells_its_version(version: str, text: str) -> None:
    assert driver_of("12.8", text) == driver_of(None, text) == version


def test_a_driver_that_does_not_tell_it() -> None:
    """As below Windows: then it is the CUDA of PyTorch, and without that nothing."""
    assert driver_of("12.8", "") == "CUDA 12.8"
    assert driver_of(None, "") is None


GPUS = [
    ("H200, 143771 MiB", "H200, 143771 MiB", True),
    ("H200, 143771 MiB", "H200, 143156 MiB", True),  # as two calls of CUDA may tell it
    ("H200, 143771 MiB", "H200", True),
    ("RTX 4060 Ti, 8188 MiB", "RTX 4060 Ti, 16380 MiB", False),
    ("RTX 3080, 10240 MiB", "RTX 3080, 12288 MiB", False),
    ("RTX 4060 Ti, 8188 MiB", "RTX 4060, 8188 MiB", False),
    ("RTX 4060 Ti, 8188 MiB", "RTX 4060", False),
    ("none", "RTX 4060, 8188 MiB", False),
    ("none", "RTX 4060", False),
    ("none", "none", True),
]


@pytest.mark.parametrize(("found", "wanted", "same"), GPUS)
def test_gpus_are_the_same_by_name_and_about_as_much_memory(found: str, wanted: str, same: bool) -> None:
    key = msgspec.structs.replace(KEY, gpu=found)
    assert key.differences({"gpu": wanted}) == ([] if same else ["gpu"])
    assert key.differences(msgspec.structs.replace(KEY, gpu=wanted)) == ([] if same else ["gpu"])


def test_what_is_not_known_is_not_compared() -> None:
    facts = {"gpu": None, "driver": None, "cpu": None, "kernels": None}
    fields = known(LAYOUT, 1, "bfloat16", **facts)
    assert set(fields) == set(Key.__struct_fields__) - set(facts)
    mine = msgspec.structs.replace(KEY, threads=1, down="bf16")
    assert mine.differences(fields) == []
    assert msgspec.structs.replace(mine, hidden=4096, activations="float32").differences(fields) == [
        "hidden",
        "activations",
    ]
    for name in facts:
        assert mine.differences(known(LAYOUT, 1, "bfloat16", **{**facts, name: "other"})) == [name]


def test_without_cuda_it_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`known`, from what others tell of a GPU, against `Key.of`, from what PyTorch does."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("ftengine._native")
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=143771 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(profile_key, "_driver_text", lambda: TOLD["570.86.10"])
    key = Key.of(LAYOUT, 1 << 20, torch.bfloat16, "cuda:0")
    assert (key.gpu, key.driver, key.activations) == ("NVIDIA H200, 143771 MiB", "570.86.10", "bfloat16")
    assert (key.gate_up, key.down, key.hidden, key.intermediate) == ("nvfp4", "bf16", 2048, 512)
    assert key.threads == native.granted_threads()
    facts = {"gpu": gpu_of("NVIDIA H200", 143771 << 20), "driver": driver_of("12.8")}
    told = known(LAYOUT, 1 << 20, "bfloat16", **facts, cpu=key.cpu, kernels=native.kernel_choice()[0])
    assert told == msgspec.structs.asdict(key)
    monkeypatch.setattr(profile_key, "_driver_text", lambda: "")
    assert Key.of(LAYOUT, 1, torch.bfloat16, "cuda:0").driver == "CUDA 12.8"
    cpu = Key.of(LAYOUT, 1, torch.bfloat16, "cpu")
    assert (cpu.gpu, cpu.driver) == ("none", "none")


def test_words_for_people() -> None:
    """Each once, in the order of the file."""
    assert words(["gpu", "driver", "cpu", "kernels", "threads"]) == "GPU, driver, CPU, kernels, number of threads"
    assert words(["gate_up", "down", "hidden", "intermediate", "activations"]) == "format, shape, dtype of activations"
