"""Freed memory is kept for the next buffer, and given back when asked for: seen in the kernel's own counters."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
import align  # before torch, as every command does
import torch
from align.heap import give_back, keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def use():  # 200 MB, more than the C library keeps of its own accord
    torch.ones(50_000_000)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
faults, held = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, resident()
give_back()
print(faults, held - resident())
"""


def measured(how: str) -> tuple[int, int]:
    """Page faults of five more buffers of the same size, and the bytes that were handed back at the end."""
    done = subprocess.run([sys.executable, "-c", MEASURE, how], capture_output=True, text=True, check=True)
    faults, given_back = done.stdout.split()
    return int(faults), int(given_back)


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_freed_memory_is_used_again_and_given_back():
    faults, given_back = measured("keep")
    assert faults < 100
    assert given_back > 150_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_without_it_every_buffer_comes_from_the_kernel():
    faults, given_back = measured("leave")
    assert faults >= 5 * 50  # pages of 2 MiB at least, five times
    assert given_back < 50_000_000
