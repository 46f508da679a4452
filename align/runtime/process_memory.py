"""A process's memory by the operating system: its peak, and how much its container still allows."""

import sys
from contextlib import suppress
from pathlib import Path


def process_peak() -> int:
    """The most bytes of this process that were resident at once, since the process or `reset_process_peak` began."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_process_peak() -> None:
    """Make the kernel forget the process's peak, which may be an earlier stage's; see proc_pid_clear_refs(5)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def cgroup_bytes_left() -> int:
    """Bytes that the control group (of a container) still allows; cached file pages that can be dropped count as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        reclaimable = next(
            int(line.split()[1]) for line in (root / "memory.stat").read_text().splitlines() if "inactive_file" in line
        )
    except (OSError, ValueError, StopIteration):
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - used + reclaimable)
