"""Progress display for long-running work: a bar on a terminal, and plain lines in a log file."""

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class LineConsole(Console):
    """Console that breaks long lines between words on a terminal, and does not break lines in a log file."""

    @property
    def soft_wrap(self) -> bool:
        """Whether long lines are left unbroken."""
        return not self.is_terminal

    @soft_wrap.setter
    def soft_wrap(self, value: bool) -> None:
        pass  # rich's constructor sets its default


console = LineConsole(stderr=True, markup=False, highlight=False)
"""Console for messages to the user. Markup is disabled, because a path may contain brackets."""
LINE_INTERVAL = 10.0
"""Seconds between lines in a log file. The first and the last step are always printed."""


class RemainingColumn(ProgressColumn):
    """Shows the remaining time of a display. Rich's column ignores steps that take longer than 30 seconds."""

    def __init__(self, display: "ProgressDisplay") -> None:
        super().__init__()
        self.display = display

    def render(self, task: Task) -> Text:
        """Return the time as text, or -:--:-- before the first step."""
        return Text(self.display.remaining() or "-:--:--", style="progress.remaining")


class ProgressDisplay:
    """Shows the number of completed steps out of `total` on stderr, if `enabled`.

    A log file gets lines such as `ppo 12/1000: reward 0.532, KL 1.23, 0:23:45 left`. The remaining time is estimated from
    the steps of this process. On a terminal, a `transient` bar disappears at the end.
    """

    def __init__(self, name: str, total: int, completed: int = 0, enabled: bool = True, transient: bool = False) -> None:
        self.name, self.total, self.completed, self.first = name.strip(), total, completed, completed
        self.text, self.started, self.printed_at, self.printed = "", time.monotonic(), -LINE_INTERVAL, -1
        self.advanced_at = self.started
        has_bar = console.is_terminal or console.is_jupyter
        self.prints_lines = enabled and not has_bar
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            RemainingColumn(self),
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
        """Stop the display."""
        self.bar.stop()
        self.prints_lines = False

    def set_text(self, text: str) -> None:
        """Set the text next to the bar, and at the end of the next line."""
        self.text = text
        self.bar.update(self.task, text=text)

    def advance(self, count: int = 1) -> None:
        """Count steps as complete."""
        self.completed, self.advanced_at = self.completed + count, time.monotonic()
        self.bar.update(self.task, completed=self.completed)
        self._print_line(last=self.completed == self.total)

    def remaining(self) -> str:
        """Return the estimated remaining time, or "" before the first step and after the last."""
        done, left = self.completed - self.first, self.total - self.completed
        if not (done and left > 0):
            return ""
        at_last_step = (self.advanced_at - self.started) / done * left
        return str(timedelta(seconds=round(max(0.0, at_last_step - (time.monotonic() - self.advanced_at)))))

    def line(self) -> str:
        """Return the current line for a log file."""
        remaining = self.remaining()
        details = ", ".join(filter(None, (self.text, remaining and f"{remaining} left")))
        return f"{self.name} {self.completed}/{self.total}" + (f": {details}" if details else "")

    def _print_line(self, last: bool) -> None:
        now = time.monotonic()
        if self.prints_lines and self.printed != self.completed and (last or now - self.printed_at >= LINE_INTERVAL):
            console.print(self.line())
            self.printed_at, self.printed = now, self.completed
