"""The choice of the model that a run keeps: the one with the lowest validation loss."""

import math
from collections.abc import Mapping
from typing import Any

from align.runtime.distributed import run_on_main
from align.training.run import Run


class BestModel:
    """The lowest validation loss so far, and the update of the last evaluation; a part of checkpoints.

    Without validation data, the newest model counts as the best.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.loss = run, math.inf
        self.evaluated: int | None = None
        self.is_missing = False

    def improves(self, update: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the model of an evaluation is to be kept."""
        self.evaluated = update
        loss = metrics.get("validation/loss")
        is_best = loss is None or loss < self.loss
        if loss is not None:
            self.loss = min(self.loss, loss)
        return is_best or self.is_missing

    def needs_evaluation(self, done: int, total: int) -> bool:
        """Return whether the model must be evaluated once more at the end: nothing is saved, or no update was left.

        Args:
            done: updates before this run began or resumed.
        """
        self.is_missing = not run_on_main((self.run.folder / "model").exists, self.run.accelerator)
        if not self.is_missing and not (done >= total and self.evaluated != done):
            return False
        self.run.say(
            f"evaluating the model after update {max(done, total)}, which is kept if it is the best or the only one"
        )
        return True

    def note(self, loss: float) -> str:
        """The losses beside the progress bar."""
        return f"loss {loss:.3f}" + (f", best validation {self.loss:.3f}" if math.isfinite(self.loss) else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"loss": self.loss, "evaluated": self.evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.loss, self.evaluated = state["loss"], state["evaluated"]
