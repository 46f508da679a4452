"""Work in a thread beside the training: the writing of a checkpoint."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from accelerate import Accelerator
from torch.distributed import ProcessGroup

from align.runtime.distributed import max_across_processes


class BackgroundWork:
    """One piece of work at a time in a thread of each process; all processes start it and wait for it together.

    The thread is no daemon: it finishes even if the run ends by an error.

    Args:
        timeout: seconds that a thread waits for the other processes' threads in one exchange.
    """

    def __init__(self, accelerator: Accelerator, timeout: float) -> None:
        self.accelerator, self.timeout = accelerator, timeout
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._group: ProcessGroup | None = None

    def group(self) -> ProcessGroup | None:
        """The threads' own process group, separate from the training's exchanges; None for a single process."""
        if self._group is None and self.accelerator.num_processes > 1:
            self._group = torch.distributed.new_group(timeout=timedelta(seconds=self.timeout), backend="gloo")
        return self._group

    def start(self, work: Callable[[], None]) -> None:
        """Start some work, after the previous one has ended."""
        self.finish()
        self._thread = threading.Thread(target=self._do, args=(work,), name="background work")
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by `check` or `finish`
            self._error = error

    def check(self) -> None:
        """Raise the work's error if the work has ended on all processes; do not wait for it."""
        if self._thread and not max_across_processes(int(self._thread.is_alive()), self.accelerator):
            self.finish()

    def finish(self) -> None:
        """Wait for the work, and raise its error."""
        thread, self._thread = self._thread, None
        if thread:
            thread.join()
        error, self._error = self._error, None
        if error:
            raise error
