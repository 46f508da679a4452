"""How a process holds the memory of its tensors on a Linux processor.

Training on a processor makes and drops the same buffers of some 100 MB again and again. As torch and the C library are set
up, each goes back to the kernel and comes again as empty 4 KiB pages: of a PPO update of SmolLM2-135M, a fifth of the time.
"""

import ctypes
import os
from contextlib import suppress

# mallopt(3) and glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def ask_for_large_pages() -> None:
    """Let torch ask the kernel for pages of 2 MiB; it looks once, at its first tensor (c10/core/impl/alloc_cpu.cpp)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Let the C library keep what this process frees, for its next buffers, until `give_back` or its end."""
    with suppress(OSError, AttributeError):
        library = _glibc()
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)


def give_back() -> None:
    """Hand freed memory that is still held to the kernel: between two runs of a process, say."""
    with suppress(OSError, AttributeError):
        _glibc().malloc_trim(0)


def _glibc() -> ctypes.CDLL:
    """The C library of this process.

    Raises:
        AttributeError: by its functions, where it is another than glibc (musl, macOS, Windows).
    """
    return ctypes.CDLL(None if os.name == "posix" else "")
