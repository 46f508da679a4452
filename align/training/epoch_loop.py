"""The shared parts of the loops that make passes over fixed examples: resuming, and the choice of the best model."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from align.batches.micro_batches import micro_batches
from align.core.tensor_ops import BatchLoss
from align.runtime.distributed import run_on_main
from align.training.checkpoint.checkpoint import Checkpoint
from align.training.data_order import DataOrder, changed_measure
from align.training.engine import TrainEngine
from align.training.peak_memory import measure_peak_memory, should_measure_memory
from align.training.run_folder import read_metrics

Example = TypeVar("Example")
MIN_UPDATES = 20
"""Minimum number of updates to compare the first and last quarter of a run."""
MIN_IMPROVEMENT = 0.01
"""Fraction by which the training loss of a run should fall."""


class EpochLoop:
    """The updates of a run with passes over examples, from the last checkpoint, and its best model so far.

    The model with the lowest validation loss is the best; without validation data, the newest one.

    Args:
        order: the examples of each update.
        eval_steps: number of updates between evaluations. 0 evaluates at the end of each epoch.
        measure: data and settings of the validation loss, see `measured_on`. If they change in a resumed run, the choice of
            the best model starts again.

    Attributes:
        done: number of updates before this run started or resumed.
        total: number of updates.
        best: lowest validation loss so far.
    """

    def __init__(self, engine: TrainEngine, order: DataOrder[Any], eval_steps: int, measure: Mapping[str, Any]) -> None:
        self.engine, self.run, self.measure = engine, engine.run, dict(measure)
        self.total, self.eval_steps = engine.total_steps, eval_steps or order.updates_per_epoch
        self.best = math.inf
        self.evaluated: int | None = None
        """The last update that was evaluated."""
        self.checkpoint = Checkpoint(self.run, engine, {"batches": order, "best": self})
        self.measured_before = self.measure
        self.done = self.checkpoint.load()
        if self.done < self.total and (line := changed_measure(self.measured_before, self.measure)):
            self.best = math.inf
            self.run.print(line)
        self.stale = self.run.stale_update(self.done)
        """The update of the model in the folder, if a killed run saved it after the checkpoint that this run continues."""

    def measure_largest_micro_batch(
        self,
        batches: Iterable[tuple[list[Example], Sequence[int]]],
        loss_of: Callable[[list[Example], list[Example]], BatchLoss],
    ) -> None:
        """Run the micro-batch of this process with the most padded tokens, if the model is so large that it may not fit.

        Args:
            batches: global batches, each with the number of tokens of its examples.
            loss_of: function of the examples of a micro-batch and of its global batch.
        """
        if self.done >= self.total or not should_measure_memory(self.engine):
            return
        largest: tuple[int, list[Example], list[int]] = (0, [], [])
        for batch, lengths in batches:
            budget, accelerator = self.run.optimization.micro_batch_tokens, self.run.accelerator
            for part in micro_batches(range(len(batch)), lengths, budget, accelerator):
                tokens = len(part.rows) * max(lengths[row] for row in part.rows)
                if tokens > largest[0]:
                    largest = tokens, batch, part.rows
        tokens, batch, rows = largest
        with measure_peak_memory(self.engine, len(rows), tokens):
            self.engine.backward(loss_of([batch[row] for row in rows], batch))

    def end_dry_run(self) -> Path:
        """Print the plan of the run, whose checkpoint has been loaded, and close it; return the folder of its model."""
        return self.run.end_dry_run(self.total, self.done)

    def updates(self) -> Iterator[int]:
        """Yield the remaining updates. After the last one, warn if the training loss did not fall."""
        yield from self.run.updates(self.done + 1, self.total, self.checkpoint)
        if self.run.is_main and self.done < self.total:
            self.run.print(flat_loss_warning([row["loss"] for row in read_metrics(self.run.folder) if "loss" in row]))
        if self.is_due_again():
            last = max(self.done, self.total)
            self.run.print(f"evaluating the model after update {last}, which is saved if it is the best or the only one")

    def is_due(self, update: int) -> bool:
        """Return whether the model is evaluated after an update."""
        return update % self.eval_steps == 0 or update == self.total

    def is_due_again(self) -> bool:
        """Return whether to evaluate after the last update: no model is saved, or a resumed run has no update left."""
        return self._has_no_model() or (self.done >= self.total and self.evaluated != self.done)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the model with these metrics is the best so far, or the only one."""
        loss = metrics.get("validation/loss")
        return loss is None or loss < self._best_kept() or (self.run.update >= self.total and self._has_no_model())

    def record_evaluation(self, metrics: Mapping[str, float], saved: bool) -> None:
        """Record the metrics of the model after the current update, and whether it was saved."""
        self.best = min(self._best_kept(), metrics.get("validation/loss", math.inf))
        if saved or self._is_replaced():
            self.stale = 0
        self.evaluated = self.run.update

    def progress(self, loss: float) -> str:
        """Return the training loss and the best validation loss as text."""
        best = f", best validation {self.best:.3f}" if math.isfinite(self.best) else ""
        return f"loss {loss:.3f}{best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the choice of the best model so far, with its data and settings."""
        return {"loss": self.best, "evaluated": self.evaluated, "measure": self.measure}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.best, self.evaluated = state["loss"], state["evaluated"]
        self.measured_before = state.get("measure", self.measure)  # a checkpoint of an earlier version lacks it

    def _is_replaced(self) -> bool:
        """Return whether the run is past the update of a stale model: the best model was replaced by one that is lost."""
        return 0 < self.stale <= self.run.update

    def _best_kept(self) -> float:
        return math.inf if self._is_replaced() else self.best

    def _has_no_model(self) -> bool:
        return self.stale > 0 or not run_on_main((self.run.folder / "model").exists, self.run.accelerator)


def flat_loss_warning(losses: Sequence[float]) -> str:
    """Return a warning if the training loss of all updates did not fall; "" if it did, or for a short run."""
    if len(losses) < MIN_UPDATES:
        return ""
    quarter = len(losses) // 4
    first, last = fmean(losses[:quarter]), fmean(losses[-quarter:])
    if last < first - MIN_IMPROVEMENT * abs(first):
        return ""
    return (
        f"warning: the training loss did not fall: its mean was {first:.4g} in the first quarter of the updates and "
        f"{last:.4g} in the last; check learning_rate, the labels in the data, and whether the model had learned them before"
    )
