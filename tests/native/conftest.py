"""Whether the sanitizers of this machine find the faults that they are for."""

from __future__ import annotations

import pytest

from tests.native.sanitized import COMPILER, build, execute

RACY = """
#include <thread>
int count = 0;
int main() { std::thread other([] { ++count; }); ++count; other.join(); }
"""
OVERRUN = "int main(int count, char **) { int *volatile p = new int[1]; p[count] = 1; return p[count]; }"


@pytest.fixture(scope="session")
def sanitizer_works(tmp_path_factory):
    """Skips where a sanitizer finds nothing: a test under it would prove nothing."""

    def check(sanitizer: str) -> None:
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        folder = tmp_path_factory.mktemp(sanitizer)
        (folder / "fault.cpp").write_text(RACY if sanitizer == "thread" else OVERRUN)
        try:
            program = build(folder / "fault", sanitizer, folder / "fault.cpp")
        except AssertionError as error:
            pytest.skip(f"the compiler has no {sanitizer} sanitizer: {str(error)[:200]}")
        done = execute(program)
        assert done.returncode != 0, f"the {sanitizer} sanitizer overlooks a fault"
        if "Sanitizer: data race" not in done.stderr and "heap-buffer-overflow" not in done.stderr:
            pytest.skip(f"the {sanitizer} sanitizer does not run here: {done.stderr[:200]}")

    return check
