"""Memory and threads of this process on a CPU.

Training on a CPU repeatedly frees and allocates buffers of about 100 MB. Returning them to the kernel each time would take a
fifth of the time of a PPO update of SmolLM2-135M.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# mallopt(3) and glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
DEFAULT_MMAP_MAX, DEFAULT_THRESHOLD = 65_536, 128 * 1024
LARGEST_THRESHOLD = 32 * 1024**2
"""Largest threshold that glibc adapts to automatically after large buffers were freed (DEFAULT_MMAP_THRESHOLD_MAX)."""


def request_huge_pages() -> None:
    """Make torch request 2 MiB pages from the kernel. Call before the first tensor (c10/core/impl/alloc_cpu.cpp)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for reuse, until `release_freed_memory` or exit."""
    with suppress(OSError, AttributeError):
        library = _glibc()
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory inside the context, see `keep_freed_memory`."""
    keep_freed_memory()
    try:
        yield
    finally:
        with suppress(OSError, AttributeError):
            library = _glibc()
            library.mallopt(M_MMAP_MAX, DEFAULT_MMAP_MAX)
            library.mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
            library.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_THRESHOLD)
            library.malloc_trim(0)


def return_freed_memory() -> None:
    """Make the C library return freed buffers of 128 KiB or more to the kernel, for layer-by-layer loading."""
    with suppress(OSError, AttributeError):
        library = _glibc()
        library.mallopt(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        library.mallopt(M_MMAP_THRESHOLD, DEFAULT_THRESHOLD)
        library.mallopt(M_TRIM_THRESHOLD, DEFAULT_THRESHOLD)
        library.malloc_trim(0)


def release_freed_memory() -> None:
    """Return freed memory to the kernel, for example between two runs in a process."""
    with suppress(OSError, AttributeError):
        _glibc().malloc_trim(0)


def _glibc() -> ctypes.CDLL:
    """Return the C library of this process.

    Unless it is glibc, accessing the functions used here raises AttributeError (musl, macOS, Windows).
    """
    return ctypes.CDLL(None if os.name == "posix" else "")


SPIN_COUNT = 10_000
"""Number of spins before a waiting thread sleeps. With GNU OpenMP's default of 300,000 (GOMP_SPINCOUNT), another busy
program slows an update of the demo's reward model on two cores from 3.2 to over 14 seconds. With this value, it takes 9."""


def share_cores() -> None:
    """Make idle threads yield to other programs quickly, unless the user has set this. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def process_peak() -> int:
    """Return the peak resident memory in bytes since the process started or `reset_process_peak` was called."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_process_peak() -> None:
    """Reset the kernel's peak memory counter, which may include an earlier stage. See proc_pid_clear_refs(5)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def cgroup_bytes_left() -> int:
    """Return the bytes still allowed by the control group. Reclaimable page cache counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        reclaimable = next(
            int(line.split()[1]) for line in (root / "memory.stat").read_text().splitlines() if "inactive_file" in line
        )
    except (OSError, ValueError, StopIteration):
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - used + reclaimable)
