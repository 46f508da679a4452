"""How a process keeps the memory of its tensors on a CPU under Linux.

Training on a CPU allocates and frees the same buffers of some 100 MB again and again. By default each is returned to the
kernel and comes back as empty 4 KiB pages, which takes a fifth of the time of a PPO update of SmolLM2-135M.
"""

import ctypes
import os
from contextlib import suppress

# mallopt(3) and glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
DEFAULT_MMAP_MAX, DEFAULT_THRESHOLD = 65_536, 128 * 1024


def request_huge_pages() -> None:
    """Let torch ask the kernel for pages of 2 MiB; it reads this once, at its first tensor (c10/core/impl/alloc_cpu.cpp)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for this process's next buffers, until `release_freed_memory` or its end."""
    with suppress(OSError, AttributeError):
        library = _glibc()
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Make the C library return each freed buffer of 128 KiB and more to the kernel at once, as it does by default.

    A model that is read layer by layer needs one layer at a time, but freed layers that are kept lie in as many places as
    there are threads and sizes: with a model of 427 MB in four parts, a process kept 1.5 GB of them.
    """
    with suppress(OSError, AttributeError):
        library = _glibc()
        library.mallopt(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        library.mallopt(M_MMAP_THRESHOLD, DEFAULT_THRESHOLD)
        library.mallopt(M_TRIM_THRESHOLD, DEFAULT_THRESHOLD)
        library.malloc_trim(0)


def release_freed_memory() -> None:
    """Return freed memory to the kernel, for example between two runs of a process."""
    with suppress(OSError, AttributeError):
        _glibc().malloc_trim(0)


def _glibc() -> ctypes.CDLL:
    """The C library of this process.

    Raises:
        AttributeError: when its functions are called, if it is not glibc (musl, macOS, Windows).
    """
    return ctypes.CDLL(None if os.name == "posix" else "")
