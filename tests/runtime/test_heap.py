"""Freed memory is kept for the next buffer, and given back when asked for: seen in the kernel's own counters.

Page faults are only ever bounded from below: a kernel that balances memory between nodes adds some of its own.
"""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
import align  # before torch, as every command does
import torch
from align.runtime.process import release_freed_memory, return_freed_memory, keep_freed_memory

if sys.argv[1] != "leave":
    keep_freed_memory()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def use():  # 200 MB, more than the C library keeps of its own accord
    torch.ones(50_000_000)

use()
if sys.argv[1] == "return":
    return_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF)
for _ in range(5):
    use()
after, held = resource.getrusage(resource.RUSAGE_SELF), resident()
release_freed_memory()
print(after.ru_minflt - before.ru_minflt, 1024 * (after.ru_maxrss - before.ru_maxrss), held - resident())
"""


def measured(how: str) -> tuple[int, int, int]:
    """Page faults of five more buffers of the same size, bytes that the peak grew by, bytes handed back at the end."""
    done = subprocess.run([sys.executable, "-c", MEASURE, how], capture_output=True, text=True, check=True)
    faults, growth, given_back = done.stdout.split()
    return int(faults), int(growth), int(given_back)


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_freed_memory_is_used_again_and_given_back():
    _, growth, given_back = measured("keep")
    assert growth < 20_000_000  # of 200 MB a buffer
    assert given_back > 150_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
@pytest.mark.parametrize("how", ["leave", "return"])
def test_without_it_every_buffer_comes_from_the_kernel(how):
    faults, _, given_back = measured(how)
    assert faults >= 5 * 50  # pages of 2 MiB at least, five times
    assert given_back < 50_000_000
