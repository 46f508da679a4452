"""The compiler of DeepSpeed's operators: one process at a time, found without an activated environment."""

import os
import sys
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows, where DeepSpeed compiles nothing
    fcntl = None  # type: ignore[assignment]


class OperatorLock:
    """Replaces torch's `FileBaton`: one process compiles DeepSpeed's operators at a time, and a dead one holds no lock.

    torch waits as long as a file exists, which a killed process leaves behind: every later run would hang. This lock is the
    kernel's, on another file beside torch's `path`; the process that waited compiles the remaining operators.
    """

    def __init__(self, path: str, **options: float | None) -> None:
        self.path, self.descriptor = f"{path}.align", -1

    def try_acquire(self) -> bool:
        """Wait for the lock; return True, which lets the caller compile."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Let the next process look."""
        os.close(self.descriptor)


def prepare_compiling() -> None:
    """Let torch compile under an `OperatorLock`, and find the ninja of an environment that is not activated."""
    programs = os.path.dirname(sys.executable)
    if programs not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
    if fcntl is not None:
        import torch.utils.cpp_extension  # a quarter of a second, which only runs with DeepSpeed need

        torch.utils.cpp_extension.FileBaton = OperatorLock  # type: ignore[misc,assignment]
