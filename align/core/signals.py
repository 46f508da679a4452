"""Stop requests: SIGTERM (preemption), SIGUSR1 (early warning of it) and SIGINT (Ctrl-C).

A run saves its state at the next safe point and exits. After SIGTERM or SIGUSR1, it exits without saving if this takes
longer than `grace_seconds`, because the cluster would kill it. Ctrl-C has no time limit; a second Ctrl-C exits
immediately.
"""

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

EXIT_STOPPED = 75
"""Exit code of a run that was asked to stop and can be resumed (EX_TEMPFAIL of sysexits.h)."""
GRACE_SECONDS = 25.0
"""Time to save after SIGTERM, in seconds. By default, clusters send SIGKILL 30 seconds later."""
WARNING_SECONDS = 270.0
"""Time to save after SIGUSR1, in seconds. configs/cluster/slurm.sbatch requests it 300 seconds before the time limit."""
SECOND_CTRL_C = 1.0
"""Time within which a repeated SIGINT counts as the same Ctrl-C, in seconds. Launchers forward the terminal's signal."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """Raised when a run ends early on request. The message says where the run resumes.

    Args:
        everywhere: whether the request stops all processes of the run.
    """

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


def grace_seconds(number: int) -> float:
    """Return the time limit for saving after a signal, in seconds. Infinity for Ctrl-C."""
    return {"SIGINT": math.inf, "SIGUSR1": WARNING_SECONDS}.get(signal.Signals(number).name, GRACE_SECONDS)


class StopRequest:
    """Records whether this process was asked to stop."""

    def __init__(self) -> None:
        self.saves = False
        self.signal, self.since = "", 0.0
        """Name and time of the first signal; "" and 0.0 until one arrives."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Mark a checkpoint as being saved, for the message if the process exits meanwhile."""
        self.saves = True
        try:
            yield
        finally:
            self.saves = False

    @contextmanager
    def listening(self, announce: Callable[[int], None] = lambda number: None) -> Iterator[None]:
        """Record signals instead of terminating (main thread only). Restore the previous handlers on exit.

        A second Ctrl-C, more than `SECOND_CTRL_C` later, raises KeyboardInterrupt. After `grace_seconds`, the process exits.

        Args:
            announce: called with the number of the first signal, in another thread.
        """
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        # Signals reach the pipe even while the main thread is inside a long computation or waits for other processes.
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reader, announce), name="align-signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            os.write(writer, b"\0")
            watcher.join()
            os.close(writer)
            os.close(reader)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:  # under a launcher, Ctrl-C arrives twice: from the terminal and forwarded
            if number == signal.SIGINT and time.monotonic() > self.since + SECOND_CTRL_C:
                raise KeyboardInterrupt
            return
        self.signal, self.since = signal.Signals(number).name, time.monotonic()

    def _watch(self, reader: int, announce: Callable[[int], None]) -> None:
        """Announce the first signal, and exit the process when its grace period expires. A 0 byte stops the thread."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        by, end = 0, math.inf
        while poll.poll(None if end == math.inf else max(0.0, end - time.monotonic()) * 1000):
            number = os.read(reader, 1)[0]
            if not number:
                return
            if number not in SIGNALS:
                continue
            if not by:
                with suppress(OSError):  # the output pipe may be closed
                    announce(number)
            if not by or time.monotonic() + grace_seconds(number) < end:  # SIGTERM after SIGUSR1 shortens it
                by, end = number, time.monotonic() + grace_seconds(number)
        undone = "during an update, without saving; the run resumes from the latest checkpoint"
        if self.saves:
            too_long = f"which took longer than {grace_seconds(by):g} s; the run resumes from the previous one"
            undone = f"while saving a checkpoint, {too_long}"
        print(f"stopped by {signal.Signals(by).name} {undone}", file=sys.stderr, flush=True)
        os._exit(EXIT_STOPPED)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM or SIGUSR1, as Python raises KeyboardInterrupt on Ctrl-C."""

    def stop(number: int, _frame: Any) -> None:
        for repeated in numbers:  # do not interrupt the shutdown
            signal.signal(repeated, signal.SIG_IGN)
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    numbers = [number for number in SIGNALS if number != signal.SIGINT]
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
