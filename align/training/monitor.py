"""The bookkeeping of a run's updates: time, FLOPs, metrics, the batch of a NaN, progress and the row of the log."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from align.core.errors import UserError
from align.core.files import write_json
from align.runtime.flops import Clock, peak_flops
from align.tokenization import Tokenization
from align.training.engine import NotFiniteError
from align.training.run import Run

LABELS = ("ranks", "rules", "targets", "attributes", "learned")
"""Labels of examples to save with a NaN batch."""


class Monitor:
    """Collects the metrics of an update, and logs them as one row.

        with monitor.update(update, describe_batch):
            ...
            monitor.lap("learn")
            monitor.add(metrics)
        monitor.add_speed(tokens, flops)
        monitor.log(update, f"loss {monitor.row['loss']:.3f}")

    Attributes:
        row: the metrics of the current update.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.clock, self.tokens_per_second = run, Clock(), 0.0
        self.row: dict[str, float] = {}

    @contextmanager
    def update(self, update: int, describe_batch: Callable[[], Sequence[dict[str, Any]]]) -> Iterator[None]:
        """Start the row and the clock of an update, whose optimizer step runs inside.

        If a loss or gradient is not finite, save the rows of `describe_batch` and raise a UserError.
        """
        self.row, self.clock = {}, Clock()
        try:
            yield
        except NotFiniteError as error:
            stop_on_nan(self.run, update, error, describe_batch())

    def lap(self, part: str) -> None:
        """End a part of the update. The time since the end of the previous part is logged as `time/<part>`."""
        self.clock.lap(part)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the row."""
        self.row |= metrics

    def add_speed(self, tokens: float, flops: float) -> None:
        """Add the FLOPs, tokens per second and MFU of the finished parts."""
        seconds = sum(self.clock.seconds.values())
        self.tokens_per_second = tokens / seconds
        self.add({"flops": flops, "speed/tokens_per_second": self.tokens_per_second, "speed/mfu": self.mfu(flops, seconds)})

    def mfu(self, flops: float, seconds: float) -> float:
        """Return the model FLOPs utilization: the fraction of all devices' peak FLOP/s, at most 1."""
        accelerator = self.run.accelerator
        achieved = flops / seconds / int(accelerator.num_processes)
        return achieved / peak_flops(accelerator.device, self.run.dtype, achieved)

    def log(self, update: int, progress: str) -> None:
        """Log the row with the time of each part, and show `progress` next to the progress bar."""
        self.run.log(update, {**self.row, **self.clock.shares()})
        self.run.set_progress(f"{progress}, {self.tokens_per_second:,.0f} tokens/s")


def stop_on_nan(run: Run, update: int, error: NotFiniteError, batch: Sequence[dict[str, object]]) -> NoReturn:
    """Save the batch that led to a NaN, as text, and raise a UserError."""
    path = run.folder / f"broken-batch-{update}.json"
    if run.is_main:
        write_json(path, batch)
    raise UserError(
        f"update {update}: {error}; weights are unchanged, the batch was saved to {path}. Lower learning_rate or check "
        "the batch"
    ) from error


def examples_as_text(examples: Sequence[Any], tokenization: Tokenization) -> list[dict[str, object]]:
    """Decode examples to text with their labels."""
    text, rows = tokenization.text, []
    for example in examples:
        has_several = hasattr(example, "responses")
        answer = {"responses": list(map(text, example.responses))} if has_several else {"response": text(example.response)}
        labels = {name: getattr(example, name) for name in LABELS if hasattr(example, name)}
        rows.append({"prompt": text(example.prompt), **answer, **labels})
    return rows
