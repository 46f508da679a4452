"""Progress of long work: a bar on a terminal, plain lines in a log file."""

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
"""Where a process prints for people, as it is: a path may hold brackets."""
LINE_INTERVAL = 10.0
"""Seconds between two lines in a log file; the first and the last step are always printed."""


class ProgressDisplay:
    """Shows how many of `total` steps are complete, on the standard error stream of an `enabled` process.

    A log file gets lines such as `ppo 12/1000: reward 0.532, KL 1.23, 0:23:45 left`. The remaining time is an estimate from
    the steps of this process. The bar of a terminal disappears at the end if it is `transient`.
    """

    def __init__(self, name: str, total: int, completed: int = 0, enabled: bool = True, transient: bool = False) -> None:
        self.name, self.total, self.completed, self.first = name.strip(), total, completed, completed
        self.text, self.started, self.printed_at, self.printed = "", time.monotonic(), -LINE_INTERVAL, -1
        has_bar = console.is_terminal or console.is_jupyter
        self.prints_lines = enabled and not has_bar
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.bar = Progress(*columns, console=console, transient=transient, disable=not (enabled and has_bar))
        self.task = self.bar.add_task(name, total=total, completed=completed, text="")

    def __enter__(self) -> "ProgressDisplay":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()
        if kind is None and self.completed == self.total > 0:
            self._print_line(last=True)

    def stop(self) -> None:
        """Show nothing from here on."""
        self.bar.stop()
        self.prints_lines = False

    def set_text(self, text: str) -> None:
        """Set the text next to the bar, and at the end of the next line."""
        self.text = text
        self.bar.update(self.task, text=text)

    def advance(self, count: int = 1) -> None:
        """Count steps as complete."""
        self.completed += count
        self.bar.update(self.task, completed=self.completed)
        self._print_line(last=self.completed == self.total)

    def line(self, seconds: float) -> str:
        """Return the line of a log file, `seconds` after the start."""
        done, left = self.completed - self.first, self.total - self.completed
        remaining = f"{timedelta(seconds=round(seconds / done * left))} left" if done and left else ""
        details = ", ".join(filter(None, (self.text, remaining)))
        return f"{self.name} {self.completed}/{self.total}" + (f": {details}" if details else "")

    def _print_line(self, last: bool) -> None:
        now = time.monotonic()
        if self.prints_lines and self.printed != self.completed and (last or now - self.printed_at >= LINE_INTERVAL):
            console.print(self.line(now - self.started))
            self.printed_at, self.printed = now, self.completed
