"""Work that a run does in a thread while it trains: writing a checkpoint."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from accelerate import Accelerator

from align.runtime.distributed import largest


class BackgroundWork:
    """One piece of work at a time, in a thread of each process; all processes start it and wait for it together.

    The thread is no daemon: it finishes its work even if the run ends by an error.

    Args:
        accelerator: the processes.
        timeout: seconds that a thread waits for the others' in one exchange.
    """

    def __init__(self, accelerator: Accelerator, timeout: float) -> None:
        self.accelerator, self.timeout = accelerator, timeout
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._group: torch.distributed.ProcessGroup | None = None

    def group(self) -> torch.distributed.ProcessGroup | None:
        """A group of all processes for the threads, apart from the training's own exchanges; None for a single process."""
        if self._group is None and self.accelerator.num_processes > 1:
            self._group = torch.distributed.new_group(timeout=timedelta(seconds=self.timeout), backend="gloo")
        return self._group

    def start(self, work: Callable[[], None]) -> None:
        """Begin some work, after the one before it."""
        self.finish()
        self._thread = threading.Thread(target=self._do, args=(work,), name="background work")
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by `check` or `finish`
            self._error = error

    def check(self) -> None:
        """If the work has ended on all processes, raise the error that it ended with; otherwise go on."""
        if self._thread and not largest(int(self._thread.is_alive()), self.accelerator):
            self.finish()

    def finish(self) -> None:
        """Wait for the work, and raise the error that it ended with."""
        thread, self._thread = self._thread, None
        if thread:
            thread.join()
        error, self._error = self._error, None
        if error:
            raise error
