"""What the native library says of the processor, and how one of its versions is chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ftengine.kernels import native

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason=native.REASON)


def choose(isa: str | None, print_: str = "choice.value, choice.reason") -> subprocess.CompletedProcess[str]:
    """In a process of its own: a choice holds for a whole process."""
    code = f"from ftengine.kernels.choice import choose_kernels\nchoice = choose_kernels()\nprint({print_})"
    environment = {name: value for name, value in os.environ.items() if name != "FT_ISA"}
    environment |= {} if isa is None else {"FT_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


def processor_flags() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line for line in file if line.startswith("flags")).split()
    except (OSError, StopIteration):
        pytest.skip("no x86 flags in /proc/cpuinfo")


def test_features_agree_with_the_operating_system():
    flags = processor_flags()
    reported = set(native.cpu_features())
    for ours, theirs in {
        "avx2": "avx2",
        "avx512": "avx512vbmi",
        "avx512_vnni": "avx512_vnni",
        "avx_vnni": "avx_vnni",
        "avx512_bf16": "avx512_bf16",
        "amx_bf16": "amx_bf16",
        "amx_int8": "amx_int8",
    }.items():
        assert (ours in reported) == (theirs in flags), ours


def test_every_version_that_the_processor_has_is_usable():
    """What the compiler left out must not go unnoticed on the machines that run these tests."""
    reported = set(native.cpu_features())
    names = {"amx": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512", "avx2": "avx2"}
    expected = [name for name, feature in names.items() if feature in reported]
    found = native.instruction_sets()
    if "amx" not in found and expected[:1] == ["amx"]:
        expected = expected[1:]  # the operating system may refuse the tiles
    assert found == [*expected, "portable"]


def test_the_choice_is_measured_among_the_versions_and_says_so():
    done = choose(None)
    assert done.returncode == 0, done.stderr
    name, _, reason = done.stdout.strip().partition(" ")
    found = native.instruction_sets()
    assert name in found
    if len(found) > 2:
        assert reason.startswith("measured")
        assert all(f"{version} " in reason for version in found if version != "portable")


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_ft_isa_forces_a_version(isa):
    assert choose(isa).stdout.strip() == f"{isa} FT_ISA"
    assert choose(f" {isa.upper()} ").stdout.strip() == f"{isa} FT_ISA"


def test_an_unknown_ft_isa_is_refused_with_the_choices():
    done = choose("sse9")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ftengine.errors.ConfigError: FT_ISA=sse9 cannot be executed by this processor")
    assert last.endswith(", ".join(native.instruction_sets()))


def test_the_choice_is_what_the_kernels_run():
    """Versions add in different orders, so that their last bits tell them apart: the forced one's are the default's."""
    code = """
import torch
from ftengine import _native
torch.manual_seed(0)
x, data, outs = torch.randn(1, 4096), torch.randn(16 * 4096).view(torch.uint8), {}
for isa in ["", *_native.instruction_sets()]:
    outs[isa] = torch.zeros(1, 16)
    _native.linear_packed(x, data, 16, 4096, 0, outs[isa], isa=isa)
print([isa for isa in outs if isa and torch.equal(outs[""], outs[isa])])
"""
    for isa in native.instruction_sets():
        start = f"from ftengine.kernels import native\nnative.use_kernels({isa!r}, 'a test')\n"
        done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)
        assert f"'{isa}'" in done.stdout, done.stderr


def test_the_front_can_ask_without_torch():
    code = """
import sys
from ftengine.kernels import choice, native
native.cpu_features(), choice.choose_kernels()
print('torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
