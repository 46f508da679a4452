"""The training loop of supervised fine-tuning, reward models and DPO: epochs over fixed examples, keeping the best model."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor, nn

from align.batches.micro_batches import micro_batches
from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings import ModelConfig
from align.runtime.clock import Clock
from align.runtime.distributed import run_on_main
from align.runtime.sequence import sequence_size
from align.training.checkpoint import load_checkpoint, restoring, save_checkpoint
from align.training.epochs import Batches, Epochs
from align.training.memory_dry_run import BatchShape, RolePass, pass_bytes
from align.training.optimization import NotFiniteError, Optimization, Sums
from align.training.run import Run, StopRequestedError

Example = TypeVar("Example")

MEMORY_ESTIMATE_UPDATES = 200
"""The memory estimate is made from the batches of at most this many updates."""


class Task(Protocol):
    """What a stage defines: its examples, its loss, its evaluation."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each training example by its row; those that are read or made for an update change with it."""

    evaluate_before_training: bool
    """Whether to evaluate before the first update, too: with a new head, those metrics mean nothing."""

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        """The loss of a global batch as a function of a micro-batch's rows. A language model's sums include `flops`."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics of an update, from sums over the global batch."""

    def evaluate(self) -> dict[str, float]:
        """Metrics on the validation data, equal on every process; `validation/loss` decides which model is the best."""

    def save(self, metrics: dict[str, float]) -> None:
        """Save the model as the run's result."""

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        """The examples of a batch, for finding the cause of a NaN."""


def train(run: Run, optimization: Optimization, task: Task, epochs: Batches, evaluate_every: int) -> None:
    """Train for `optimization.total` updates; evaluate, keep the best model and write checkpoints in between.

    Args:
        epochs: which examples each update learns from.
        evaluate_every: updates between evaluations; 0: at the end of each epoch.
    """
    total, evaluate_every = optimization.total, evaluate_every or epochs.updates_per_epoch
    done, progress = load_checkpoint(run, optimization)
    best, evaluated = progress.get("best", math.inf), progress.get("evaluated")
    with restoring(run):
        epochs.load_state(progress.get("batches", {}))
    if not done and task.evaluate_before_training:
        run.log(0, task.evaluate())

    place = epochs.state()  # after the last update that has ended

    def save(update: int) -> None:
        save_checkpoint(run, optimization, update, {"best": best, "evaluated": evaluated, "batches": place})

    def keep_if_best(metrics: dict[str, float], must_keep: bool = False) -> None:
        nonlocal best
        loss = metrics.get("validation/loss")
        if must_keep or loss is None or loss < best:  # without validation data, the newest model counts as the best
            best = best if loss is None else min(best, loss)
            task.save(metrics)

    for update in run.updates(done + 1, total, save):
        rows = epochs.rows(update)
        plan = micro_batches(rows, [task.lengths[row] for row in rows], run.config.micro_batch_tokens, run.accelerator)
        clock = Clock()
        try:
            sums = optimization.accumulate(plan, task.loss(rows))
            clock.lap("learn")
            step = optimization.step(update)
            clock.lap("step")
        except NotFiniteError as error:
            stop_on_nan(run, update, error, task.describe(rows))
        except StopRequestedError:
            run.end_early(update - 1, save)
        metrics = task.metrics({name: float(value) for name, value in sums.items()}) | step
        if "flops" in sums:
            flops = float(sums["flops"])
            metrics |= {"flops": flops} | run.speed(metrics["tokens/read"], flops, sum(clock.seconds.values()))
        if update % evaluate_every == 0 or update == total:
            metrics |= task.evaluate()
            keep_if_best(metrics)
            evaluated = update
            clock.lap("validate")
        metrics |= clock.shares()
        place = epochs.state()
        run.log(update, metrics)
        run.note(f"loss {metrics['loss']:.3f}" + (f", best validation {best:.3f}" if math.isfinite(best) else ""))
    has_model = run_on_main((run.folder / "model").exists, run.accelerator)
    if not has_model or (done >= total and evaluated != done):
        run.say(f"evaluating the model after update {max(done, total)}, which is kept if it is the best or the only one")
        keep_if_best(task.evaluate(), must_keep=not has_model)


def largest_micro_batch(run: Run, batches: Iterable[tuple[list[int], list[int]]]) -> tuple[list[int], bool]:
    """Find the micro-batch that needs the most memory.

    Args:
        batches: for each batch its rows and their tokens.

    Returns:
        The rows of the micro-batch with the most padded tokens, and whether any batch has more than one micro-batch.
    """
    largest: tuple[int, list[int]] = (0, [])
    accumulates = False
    for rows, lengths in batches:
        tokens = dict(zip(rows, lengths, strict=True))
        plan = micro_batches(rows, lengths, run.config.micro_batch_tokens, run.accelerator)
        accumulates |= len(plan) > 1
        largest = max(largest, *((len(part.rows) * max(tokens[row] for row in part.rows), part.rows) for part in plan))
    return largest[1], accumulates


def check_memory(
    run: Run,
    config: ModelConfig,
    module: nn.Module,
    role_pass: RolePass,
    epochs: Epochs,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    token_counts: Callable[[Sequence[Example]], list[int]],
    batch_shape: Callable[[Sequence[Example]], BatchShape],
    teachers: Sequence[RolePass] = (),
) -> None:
    """Tell how much memory a run of this loop will need.

    Args:
        module: what is trained.
        role_pass: how it reads a micro-batch.
        epochs: which examples each update learns from.
        token_counts: tokens that each example holds in memory.
        batch_shape: the shape of a micro-batch of some examples.
        teachers: frozen models that read each micro-batch too.

    Raises:
        UserError: if that is more than there is.
    """
    first = len(epochs.ramp) + 1  # the largest batches
    updates = range(first, first + min(MEMORY_ESTIMATE_UPDATES, epochs.updates_per_epoch))
    batches = map(epochs.rows, updates)
    sized = ((rows, token_counts([examples[row] for row in rows])) for rows in batches)
    rows, accumulates = largest_micro_batch(run, sized)
    largest = [examples[row] for row in rows]
    passes = [*teachers, role_pass]
    # Processes that share rows hold a part of them each.
    sharing = sequence_size(run.accelerator)
    phases = {"learning": lambda: pass_bytes(passes, batch_shape(largest), backward=True) // sharing}
    if held_out:
        rows, _ = largest_micro_batch(run, [(list(range(len(held_out))), token_counts(held_out))])
        largest_held_out = [held_out[row] for row in rows]
        phases["validation"] = lambda: pass_bytes(passes, batch_shape(largest_held_out), backward=False) // sharing
    run.say(run.memory.check(config, module, [teacher.backbone for teacher in teachers], phases, accumulates))


def stop_on_nan(run: Run, update: int, error: NotFiniteError, batch: list[dict[str, object]]) -> None:
    """Save the batch that led to a NaN, and end the run.

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
