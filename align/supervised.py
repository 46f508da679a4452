"""The loop that supervised fine-tuning and reward training share: epochs over fixed examples, the best model kept."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from align.batching import micro_batches
from align.errors import UserError
from align.files import write_json
from align.generation import generator
from align.run import Clock, Run
from align.training import NotFiniteError, Optimisation, Sums, load_checkpoint, save_checkpoint

ORDER = 1
"""What the random numbers of `generator(seed, ORDER, epoch)` are for: the order of examples."""


LOOKED_AHEAD = 200
"""Updates whose batches are looked at for the estimate of memory."""


class Task(Protocol):
    """What a stage brings: its examples, its loss, its evaluation."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each training example."""

    evaluates_start: bool
    """Whether the figures before the first update mean anything: a head that was just made says nothing."""

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        """The loss of a global batch, as a function of a micro-batch's rows; of a language model, one sum is `flops`."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Figures of an update, from sums over the global batch."""

    def evaluate(self) -> dict[str, float]:
        """Figures on the validation data, the same on every process; `validation/loss` chooses the best model."""

    def save(self, figures: dict[str, float]) -> None:
        """Save the model as the run's result."""

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        """The examples of a batch, for a person who looks for the cause of a NaN."""


def train(
    run: Run, optimisation: Optimisation, task: Task, batch_size: int, updates_an_epoch: int, evaluate_every: int
) -> None:
    """Train for `optimisation.total` updates; evaluate, keep the best model, and write checkpoints on the way.

    Args:
        batch_size: examples in a global batch.
        evaluate_every: updates between evaluations; 0: at the end of each epoch.
    """
    total, every = optimisation.total, evaluate_every or updates_an_epoch
    done, progress = load_checkpoint(run, optimisation)
    best = progress.get("best", math.inf)
    if not done and task.evaluates_start:
        run.log(0, task.evaluate())
    for update in run.updates(done + 1, total):
        rows = rows_of(run, len(task.lengths), batch_size, update)
        plan = micro_batches(rows, [task.lengths[row] for row in rows], run.config.micro_batch_tokens, run.accelerator)
        clock = Clock()
        try:
            sums = optimisation.accumulate(plan, task.loss(rows))
            clock.lap("learn")
            step = optimisation.step(update)
            clock.lap("step")
        except NotFiniteError as error:
            stop_on_nan(run, update, error, task.describe(rows))
        figures = task.metrics({name: float(value) for name, value in sums.items()}) | step
        if "flops" in sums:
            flops = float(sums["flops"])
            figures |= {"flops": flops} | run.speed(figures["tokens/read"], flops, sum(clock.seconds.values()))
        if update % every == 0 or update == total:
            figures |= task.evaluate()
            loss = figures.get("validation/loss")
            if loss is None or loss < best:  # with nothing to validate on, the newest model is the best known
                best = best if loss is None else loss
                task.save(figures)
            clock.lap("validate")
        figures |= clock.shares()
        run.log(update, figures)
        run.note(f"loss {figures['loss']:.3f}" + (f", best validation {best:.3f}" if math.isfinite(best) else ""))
        if run.config.save_every and update % run.config.save_every == 0:
            save_checkpoint(run, optimisation, update, {"best": best})


def rows_of(run: Run, examples: int, batch_size: int, update: int) -> list[int]:
    """The examples of update 1..: each epoch goes through all of them in an order of its own."""
    epoch, place = divmod(update - 1, math.ceil(examples / batch_size))
    order: list[int] = generator(run.config.seed, ORDER, epoch).permutation(examples).tolist()
    return order[place * batch_size : (place + 1) * batch_size]


def largest_batch(run: Run, batches: Iterable[tuple[list[int], list[int]]]) -> tuple[list[int], bool]:
    """The rows of the micro-batch with the most tokens, and whether any batch is cut into several.

    Args:
        batches: for each batch its rows and their tokens.
    """
    largest: tuple[int, list[int]] = (0, [])
    several = False
    for rows, lengths in batches:
        tokens = dict(zip(rows, lengths, strict=True))
        plan = micro_batches(rows, lengths, run.config.micro_batch_tokens, run.accelerator)
        several |= len(plan) > 1
        largest = max(largest, *((len(part.rows) * max(tokens[row] for row in part.rows), part.rows) for part in plan))
    return largest[1], several


def stop_on_nan(run: Run, update: int, error: NotFiniteError, batch: list[dict[str, object]]) -> None:
    """Save the batch that broke the run and end with its name.

    Raises:
        UserError: always.
    """
    path = run.folder / f"broken-batch-{update}.json"
    if run.is_main:
        write_json(path, batch)
    raise UserError(
        f"update {update}: {error}; the weights before it are unharmed, the batch is in {path}. "
        "Lower learning_rate, or look at that batch"
    ) from error
