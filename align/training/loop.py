"""The training loop of supervised fine-tuning, reward models and DPO: epochs over fixed examples, keeping the best model."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.micro_batches import micro_batches
from align.batches.mixtures import MixedExamples, TrainingData, data_name
from align.batches.streams import examples_digest
from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings import MixtureConfig, ModelConfig
from align.models.loading import LoadedModel
from align.runtime.distributed import run_on_main
from align.runtime.flops import Clock
from align.runtime.sequence import sequence_size
from align.training import checkpoint
from align.training.checkpoint import restoring
from align.training.epochs import Batches, EpochConfig, Epochs, parse_ramp
from align.training.memory_dry_run import BatchShape, RolePass, pass_bytes
from align.training.optimization import NotFiniteError, Optimization, Sums
from align.training.run import Run, StopRequestedError
from align.training.start import Model, make_optimization, open_run, say_if_prompts_are_repeated

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
    done, progress = checkpoint.load(run, optimization)
    best, evaluated = progress.get("best", math.inf), progress.get("evaluated")
    with restoring(run):
        epochs.load_state(progress.get("batches", {}))
    if not done and task.evaluate_before_training:
        run.log(0, task.evaluate())

    place = epochs.state()  # after the last update that has ended

    def save(update: int) -> None:
        checkpoint.save(run, optimization, update, {"best": best, "evaluated": evaluated, "batches": place})

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


Config = TypeVar("Config", bound=EpochConfig)


class StageTask(Task, Protocol):
    """A task with what it trains and where its model is saved."""

    optimization: Optimization
    folder: Path


class EpochTrainer:
    """Base of a stage's trainer, whose constructor calls this one, then `make_optimization`, then sets `task`.

    Args:
        config: the stage's settings.
        stage: its name, as for `Run`.
        model: what is trained; this and the other arguments as for `open_run`.

    Attributes:
        run: the stage's run.
        loaded: the model that is trained.
        config: the stage's settings.
        epochs: which examples each update learns from.
        batches: supplies each update's batch: `epochs`, unless examples are streamed or written during training.
        task: its examples, loss and evaluation.
    """

    run: Run
    loaded: LoadedModel
    epochs: Epochs
    batches: Batches
    task: StageTask

    def __init__(
        self,
        config: EpochConfig,
        stage: str,
        model: Model,
        tokenizer: PreTrainedTokenizerBase | None,
        adapter: str = "policy",
        allow_reward_model: bool = False,
    ) -> None:
        self.config = config
        self.run, self.loaded = open_run(config, stage, model, tokenizer, adapter, allow_reward_model)

    def make_optimization(
        self,
        module: nn.Module,
        mixed: MixedExamples[Example],
        held_out: Sequence[Example],
        token_counts: Callable[[Sequence[Example]], list[int]],
        batch_shape: Callable[[Sequence[Example]], BatchShape],
        takes_logits: bool,
        teachers: Sequence[RolePass] = (),
        stream: Batches | None = None,
    ) -> Optimization:
        """Build the training engine after checking available memory.

        Args:
            module: what is trained, `loaded` with its heads.
            mixed: the examples to learn from.
            held_out: those to evaluate on.
            token_counts: tokens that each example holds in memory.
            batch_shape: the shape of a micro-batch of some examples.
            takes_logits: whether tokens are predicted.
            teachers: frozen models that read each micro-batch too.
            stream: examples that are read while the model learns; `mixed` are then as large as they may be.

        Raises:
            UserError: if memory is insufficient.
        """
        config = self.config
        responses = (len(batch_shape([example]).response_tokens) for example in mixed.examples)
        say_if_prompts_are_repeated(self.run, self.loaded.backbone, responses)
        mixing = config if isinstance(config, MixtureConfig) else None
        ramp = parse_ramp(config.batch_ramp)
        digest = examples_digest(mixed.examples)
        self.epochs = Epochs(config.seed, config.batch_size, mixed.sizes, mixed.weights, mixing, ramp, digest)
        self.batches = stream or self.epochs
        role_pass = RolePass(self.loaded.backbone, self.loaded.adapter, takes_logits)
        parts = (self.epochs, mixed.examples, held_out, token_counts, batch_shape, teachers)
        check_memory(self.run, self.run.config, module, role_pass, *parts)
        return make_optimization(self.run, module, self.batches.updates(config.epochs))

    def train(self) -> Path:
        """Train from the last checkpoint on; returns the folder of the best model."""
        train(self.run, self.task.optimization, self.task, self.batches, self.config.evaluate_every)
        self.run.close()
        return self.task.folder


def with_data_names(config: Config, **data: TrainingData) -> Config:
    """Settings that say what a trainer was given, by the names of settings: a file's name, or how many records."""
    return replace(config, **{name: data_name(given) for name, given in data.items()})  # type: ignore[arg-type]
