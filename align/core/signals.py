"""Requests to stop: SIGTERM (a cluster takes the machine back), SIGUSR1 (it will soon) and SIGINT (Ctrl-C).

A run ends at the next place where its state can be saved, and saves. After SIGTERM and SIGUSR1 it ends without saving if
that takes too long (`grace_seconds`), because the cluster would kill it. Ctrl-C has no time limit: a second one ends the run
at once.
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
"""Exit code of a run that was asked to stop and can be resumed: EX_TEMPFAIL of sysexits.h, "try again later"."""
GRACE_SECONDS = 25.0
"""The time to save after SIGTERM. Clusters kill 30 seconds after it, unless told otherwise."""
WARNING_SECONDS = 270.0
"""The time to save after SIGUSR1, which configs/cluster/slurm.sbatch requests 300 seconds before the time limit."""
SECOND_CTRL_C = 1.0
"""Seconds within which a second Ctrl-C counts as the first one: a launcher forwards the signal of the terminal."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A run ended early because it was asked to; the message tells where it resumes.

    Args:
        everywhere: whether all processes of the run end by the same request.
    """

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


def grace_seconds(number: int) -> float:
    """Return the time from a signal to the end of a process that could not save: infinity after Ctrl-C."""
    return {"SIGINT": math.inf, "SIGUSR1": WARNING_SECONDS}.get(signal.Signals(number).name, GRACE_SECONDS)


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.saves = False
        self.signal, self.since = "", 0.0
        """The name of the signal and when it came; "" before one came."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Mark that a checkpoint is being written: a process that ends meanwhile tells it."""
        self.saves = True
        try:
            yield
        finally:
            self.saves = False

    @contextmanager
    def listening(self, announce: Callable[[int], None] = lambda number: None) -> Iterator[None]:
        """Note signals instead of dying from them, in a program's main thread; afterward handlers are as they were.

        A second Ctrl-C, a second later, interrupts at once. After `grace_seconds` the process ends.

        Args:
            announce: called at once, in another thread, with the number of the first signal.
        """
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        # The kernel's signal reaches the pipe even while the main thread is inside a long computation or waits for others.
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
        if self.signal:  # Ctrl-C comes twice at once under a launcher: from the terminal, and passed on
            if number == signal.SIGINT and time.monotonic() > self.since + SECOND_CTRL_C:
                raise KeyboardInterrupt
            return
        self.signal, self.since = signal.Signals(number).name, time.monotonic()

    def _watch(self, reader: int, announce: Callable[[int], None]) -> None:
        """Announce the first signal, until 0 comes; end the process if it still runs after the time of grace of one."""
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
                with suppress(OSError):  # nothing reads the output
                    announce(number)
            if not by or time.monotonic() + grace_seconds(number) < end:  # SIGTERM after SIGUSR1 leaves less
                by, end = number, time.monotonic() + grace_seconds(number)
        undone = "during an update, without saving; the run resumes from the latest checkpoint"
        if self.saves:
            too_long = f"which took longer than {grace_seconds(by):g} s; the run resumes from the previous one"
            undone = f"while saving a checkpoint, {too_long}"
        print(f"stopped by {signal.Signals(by).name} {undone}", file=sys.stderr, flush=True)
        os._exit(EXIT_STOPPED)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """End a program with `Stopped` when SIGTERM or SIGUSR1 comes, as Ctrl-C does with KeyboardInterrupt."""

    def stop(number: int, _frame: Any) -> None:
        for repeated in numbers:  # the end is not to be interrupted
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
