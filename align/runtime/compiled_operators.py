"""DeepSpeed compiles operators on their first use: a process that is killed meanwhile must not block all later runs."""

import os
import sys
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows, where DeepSpeed compiles nothing
    fcntl = None  # type: ignore[assignment]


class OperatorLock:
    """In the place of torch's `FileBaton`: one process compiles at a time, and a dead one holds nothing.

    To torch, an operator is being compiled as long as a file is there. A process that is killed leaves the file, and every
    later run on the machine waits for its removal, without a word and without an end. This lock is the kernel's, on a file
    of its own; whoever has waited for it compiles what is still missing.

    Args:
        path: torch's file; a record lock, as that of `align.training.lock`, is taken on another one beside it.
        options: torch's, how to wait.
    """

    def __init__(self, path: str, **options: float | None) -> None:
        self.path, self.descriptor = f"{path}.align", -1

    def try_acquire(self) -> bool:
        """Wait for the lock; returns True, for the caller to compile."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Let the next process look."""
        os.close(self.descriptor)


def prepare_compiling() -> None:
    """From now on, torch compiles in this process under an `OperatorLock`, and finds the ninja of its environment.

    Without the latter, a program that is started by its path, in an environment that is not activated, has none.
    """
    programs = os.path.dirname(sys.executable)
    if programs not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
    if fcntl is not None:
        import torch.utils.cpp_extension  # a quarter of a second, which only runs with DeepSpeed need

        torch.utils.cpp_extension.FileBaton = OperatorLock  # type: ignore[misc,assignment]
