"""How a process on Linux keeps freed memory, and how its threads wait: seen in the kernel's counters and by OpenMP's report.

Page faults are only ever bounded from below: a kernel that balances memory between nodes adds some of its own.
"""

import os
import re
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
    for how in ("leave", "return"):  # without it every buffer comes from the kernel
        faults, _, given_back = measured(how)
        assert faults >= 5 * 50  # pages of 2 MiB at least, five times
        assert given_back < 50_000_000


def settings_read(**given: str) -> dict[str, str]:
    """OpenMP's settings in a process that imports this package and then torch, by what it prints itself."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    done = subprocess.run([sys.executable, "-c", "import align, torch"], capture_output=True, text=True, check=True, env=env)
    return dict(re.findall(r"(GOMP_SPINCOUNT|OMP_WAIT_POLICY) = '(\w+)'", done.stderr))


@pytest.mark.slow  # a quarter of a minute of waiting threads
@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux alone")
def test_threads_wait_awake_for_a_short_time_unless_the_user_says_how_long():
    assert settings_read()["GOMP_SPINCOUNT"] == "10000"
    assert settings_read(GOMP_SPINCOUNT="7")["GOMP_SPINCOUNT"] == "7"
    assert settings_read(OMP_WAIT_POLICY="ACTIVE")["OMP_WAIT_POLICY"] == "ACTIVE"
    assert settings_read(OMP_WAIT_POLICY="ACTIVE")["GOMP_SPINCOUNT"] != "10000"
