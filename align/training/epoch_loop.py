"""The shared parts of the loops over epochs: resuming, timing, the batch of a NaN, and the best model."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from torch import Tensor

from align.batches.micro_batches import micro_batches
from align.runtime.distributed import run_on_main
from align.runtime.flops import Clock
from align.tokenization import Tokenization
from align.training.checkpoint import Checkpoint
from align.training.data_order import DataOrder, changed_measure
from align.training.engine import NotFiniteError, Sums, TrainEngine
from align.training.run_folder import read_metrics
from align.training.start import examples_as_text, measure_peak_memory, should_measure_memory, stop_on_nan

Example = TypeVar("Example")
LEAST_UPDATES = 20
"""Updates of a run whose first and last quarter can be compared."""
LEAST_FALL = 0.01
"""Share by which the training loss of a run should fall."""


class EpochLoop:
    """The updates of a run that makes passes over examples, from the last checkpoint on.

    The model with the lowest validation loss is the best; without validation data, the newest one.

    Args:
        order: the examples of each update.
        eval_steps: updates between evaluations; 0: at the end of each epoch.
        measure: data and settings of the validation loss, see `measured_on`. If a resumed run has another one, the choice of
            the best model starts again.

    Attributes:
        done: updates before this run began or resumed.
        total: updates in all.
    """

    def __init__(self, engine: TrainEngine, order: DataOrder[Any], eval_steps: int, measure: Mapping[str, Any]) -> None:
        self.engine, self.run, self.clock, self.measure = engine, engine.run, Clock(), dict(measure)
        self.total, self.eval_steps = engine.total_steps, eval_steps or order.updates_per_epoch
        self.best, self.is_missing = math.inf, False
        self.evaluated: int | None = None
        self.checkpoint = Checkpoint(self.run, engine, {"batches": order, "best": self})
        self.measured_before = self.measure
        self.done = self.checkpoint.load()
        if self.done < self.total and (line := changed_measure(self.measured_before, self.measure)):
            self.best = math.inf
            self.run.print(line)
        self.stale = self.run.stale_update(self.done)

    def measure_largest_micro_batch(
        self,
        batches: Iterable[tuple[list[Example], Sequence[int]]],
        loss_of: Callable[[list[Example], list[Example]], tuple[Tensor, Sums]],
    ) -> None:
        """Run the micro-batch of this process with the most padded tokens, if the model is so large that it may not fit.

        `batches` are global batches with the tokens of each example. `loss_of` takes the examples of a micro-batch and of
        its batch.
        """
        if self.done >= self.total or not should_measure_memory(self.engine):
            return
        found: tuple[int, list[Example], list[int]] = (0, [], [])
        for batch, lengths in batches:
            for part in micro_batches(
                range(len(batch)), lengths, self.run.optimization.micro_batch_tokens, self.run.accelerator
            ):
                tokens = len(part.rows) * max(lengths[row] for row in part.rows)
                if tokens > found[0]:
                    found = tokens, batch, part.rows
        tokens, batch, rows = found
        with measure_peak_memory(self.engine, rows, tokens):
            self.engine.backward(*loss_of([batch[row] for row in rows], batch))

    def end_dry_run(self) -> Path:
        """Print the plan of the run, whose checkpoint has been loaded, and close it; return the folder of its model."""
        return self.run.end_dry_run(self.total, self.done)

    def updates(self) -> Iterator[int]:
        """Count the updates that are left; warn after the last one if the training loss did not fall."""
        yield from self.run.updates(self.done + 1, self.total, self.checkpoint)
        if self.run.is_main and self.done < self.total:
            self.run.print(flat_loss_warning([row["loss"] for row in read_metrics(self.run.folder) if "loss" in row]))

    @contextmanager
    def learning(self, update: int, batch: Sequence[Any], tokenization: Tokenization) -> Iterator[None]:
        """Time the micro-batches and the step inside; save the batch as text and end the run if they meet a NaN."""
        self.clock = self.engine.clock = Clock()
        try:
            yield
        except NotFiniteError as error:
            stop_on_nan(self.run, update, error, examples_as_text(batch, tokenization))

    def costs(self, tokens: int, flops: float) -> dict[str, float]:
        """Return the tokens that the update read, its FLOPs, and its speed."""
        seconds = sum(self.clock.seconds.values())
        return {"tokens/read": float(tokens), "flops": flops} | self.run.speed(tokens, flops, seconds)

    def evaluates(self, update: int) -> bool:
        """Return whether the model is evaluated after an update."""
        if update % self.eval_steps and update != self.total:
            return False
        self.evaluated = update
        return True

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the model of an evaluation is to be kept."""
        loss = metrics.get("validation/loss")
        if self.stale and self.run.update >= self.stale:  # the best model was replaced by one that did not come back
            self.best, self.stale = math.inf, 0
        is_best = loss is None or loss < self.best or self.is_missing
        self.best = self.best if loss is None else min(self.best, loss)
        self.stale = 0 if is_best else self.stale
        return is_best

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an update, with the shares of its time."""
        if self.evaluated == update:
            self.clock.lap("validate")
        self.run.log(update, {**metrics, **self.clock.shares()})
        best = f", best validation {self.best:.3f}" if math.isfinite(self.best) else ""
        self.run.set_progress(f"loss {metrics['loss']:.3f}{best}")

    def needs_evaluation(self) -> bool:
        """Return whether the model must be evaluated once more at the end: none is saved, or no update was left."""
        has_model = run_on_main((self.run.folder / "model").exists, self.run.accelerator)
        self.is_missing = not has_model or self.stale > 0
        if not self.is_missing and not (self.done >= self.total and self.evaluated != self.done):
            return False
        last = max(self.done, self.total)
        self.run.print(f"evaluating the model after update {last}, which is kept if it is the best or the only one")
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the choice of the best model so far, with its data and settings."""
        return {"loss": self.best, "evaluated": self.evaluated, "measure": self.measure}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.evaluated = state["loss"], state["evaluated"]
        self.measured_before = state.get("measure", self.measure)  # a checkpoint of an earlier version lacks it


def flat_loss_warning(losses: Sequence[float]) -> str:
    """Return a warning if the training loss of all updates did not fall; "" if it did, or for a short run."""
    if len(losses) < LEAST_UPDATES:
        return ""
    quarter = len(losses) // 4
    first, last = fmean(losses[:quarter]), fmean(losses[-quarter:])
    if last < first - LEAST_FALL * abs(first):
        return ""
    return (
        f"warning: the training loss did not fall: its mean was {first:.4g} in the first quarter of the updates and "
        f"{last:.4g} in the last; check learning_rate, the labels in the data, and whether the model had learned them before"
    )
