"""The worker threads of csrc/team.cpp: a stress program under the sanitizers, and what they do to the process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftengine.kernels import native
from tests.native.sanitized import build, holds


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_program_holds_under_a_sanitizer(sanitizer, sanitizer_works, tmp_path):
    sanitizer_works(sanitizer)
    holds(build(tmp_path / "stress", sanitizer, Path(__file__).with_name("team_stress.cpp"), "team.cpp"))


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
