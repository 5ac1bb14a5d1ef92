"""csrc/lane.cpp under the sanitizers; what it computes is in tests/experts/test_lane.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.sanitized import build, holds

LIBRARY = ("lane.cpp", "team.cpp", "expert_ops.cpp")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_program_holds_under_a_sanitizer(sanitizer, sanitizer_works, tmp_path):
    sanitizer_works(sanitizer)
    source = Path(__file__).with_name("lane_stress.cpp")
    holds(build(tmp_path / "stress", sanitizer, source, *LIBRARY))
