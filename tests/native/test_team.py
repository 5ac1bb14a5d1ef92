"""The worker threads of csrc/team.cpp: a stress program under the sanitizers, and what they do to the process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftengine.kernels import native

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = (os.environ.get("CXX"), "c++", "g++", "clang++")
COMPILER = next((name for name in COMPILERS if name and shutil.which(name)), None)
RACY = """
#include <thread>
int count = 0;
int main() { std::thread other([] { ++count; }); ++count; other.join(); }
"""
OVERRUN = "int main(int count, char **) { int *volatile p = new int[1]; p[count] = 1; return p[count]; }"


def build(source: Path, program: Path, sanitizer: str) -> Path:
    assert COMPILER is not None
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    sources = [source, ROOT / "csrc" / "team.cpp"] if source.name == "team_stress.cpp" else [source]
    command = [COMPILER, *flags, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return program


def execute(program: Path) -> subprocess.CompletedProcess[str]:
    # The child of a fork may use threads of its own: that is part of what is tested.
    # Leaks are not looked for: a child that ends while its team works is part of it too, and what running threads hold
    # then counts as leaked where the system does not let them be stopped.
    environment = os.environ | {"TSAN_OPTIONS": "die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in done.stderr and shutil.which("setarch"):
        # Kernels that place memory more randomly than an old thread sanitizer expects.
        command = ["setarch", "-R", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done


@pytest.fixture(scope="module")
def sanitizer_works(tmp_path_factory):
    """Whether a sanitizer finds the fault that it is for: a test under one that finds nothing would prove nothing."""

    def check(sanitizer: str) -> None:
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        folder = tmp_path_factory.mktemp(sanitizer)
        (folder / "fault.cpp").write_text(RACY if sanitizer == "thread" else OVERRUN)
        try:
            program = build(folder / "fault.cpp", folder / "fault", sanitizer)
        except AssertionError as error:
            pytest.skip(f"the compiler has no {sanitizer} sanitizer: {str(error)[:200]}")
        done = execute(program)
        assert done.returncode != 0, f"the {sanitizer} sanitizer overlooks a fault"
        if "Sanitizer: data race" not in done.stderr and "heap-buffer-overflow" not in done.stderr:
            pytest.skip(f"the {sanitizer} sanitizer does not run here: {done.stderr[:200]}")

    return check


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_program_holds_under_a_sanitizer(sanitizer, sanitizer_works, tmp_path):
    sanitizer_works(sanitizer)
    done = execute(build(ROOT / "tests" / "native" / "team_stress.cpp", tmp_path / "stress", sanitizer))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "all checks hold"
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


WORK = """
import torch
from ftengine import _native
def work(threads):
    out = torch.zeros(4, 4096)
    _native.linear_packed(torch.ones(4, 64), data, 4096, 64, 0, out, threads=threads)
    assert torch.equal(out, torch.full_like(out, 64.0))
data = torch.ones(4096 * 64).view(torch.uint8)
"""


def python(code: str, **options) -> str:
    command = [sys.executable, "-c", WORK + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


needs_library = pytest.mark.skipif(not native.AVAILABLE, reason=native.REASON)
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")


@needs_library
@needs_affinity
def test_no_more_threads_than_the_affinity_mask_has_cpus():
    cpu = max(os.sched_getaffinity(0))
    code = f"""
import os
os.sched_setaffinity(0, {{{cpu}}})
before = len(os.listdir("/proc/self/task"))
work(8)
print(len(os.listdir("/proc/self/task")) - before, _native.granted_threads(), _native.physical_cores())
"""
    assert python(code) == f"0 1 [{cpu}]"


@needs_library
@needs_affinity
def test_helpers_are_pinned_to_one_core_each_and_the_caller_to_none():
    code = """
import os
def masks():
    return {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}
before = masks()
work(_native.granted_threads())
helpers = [mask for task, mask in masks().items() if task not in before]
cores = set(_native.physical_cores())
if len(cores) < 2 or _native.granted_threads() < len(cores):
    print("as expected: nothing to divide")
else:
    assert len(helpers) == _native.granted_threads() - 1, helpers
    pinned = [min(mask) for mask in helpers if len(mask) == 1]
    assert len(pinned) == len(set(pinned)) == len(cores) - 1, helpers
    assert set(pinned) < cores
    assert os.sched_getaffinity(0) == before[str(os.getpid())]
    print("as expected: one core each")
"""
    assert python(code).startswith("as expected")


@needs_library
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_computes_with_threads_of_its_own():
    code = """
import os
work(2)
child = os.fork()
work(2)
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "0"


@needs_library
def test_the_process_ends_while_helpers_sleep():
    assert python("import time; work(2); time.sleep(0.05); print('end')") == "end"


@needs_library
def test_callers_in_parallel_get_their_own_results():
    code = """
import threading
errors = []
def some():
    try:
        for _ in range(200):
            work(3)
    except BaseException as error:
        errors.append(error)
callers = [threading.Thread(target=some) for _ in range(4)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print(errors)
"""
    assert python(code) == "[]"
