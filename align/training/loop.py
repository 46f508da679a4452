"""The training loop of supervised fine-tuning, reward models and DPO: epochs over fixed examples, keeping the best model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.micro_batches import micro_batches
from align.batches.mixtures import MixedExamples, TrainingData, data_name
from align.batches.streams import examples_digest
from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings import MixtureConfig, ModelConfig, SequenceConfig
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.runtime.distributed import run_on_main
from align.runtime.flops import Clock
from align.training import checkpoint
from align.training.checkpoint import restoring
from align.training.epochs import Batches, EpochConfig, Epochs
from align.training.optimization import NotFiniteError, Optimization, Sums
from align.training.run import Run, StopRequestedError
from align.training.start import Model, make_optimization, open_run, say_if_prompts_are_repeated

Example = TypeVar("Example")

PLANNED_UPDATES = 200
"""The largest micro-batch is that of at most this many updates."""


class Task(Protocol):
    """What a stage defines: its examples, its loss, its evaluation."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each training example by its row; those that are read or made for an update change with it."""

    evaluate_before_training: bool
    """Whether to evaluate before the first update, too: with a new head, those metrics mean nothing."""
    optimization: Optimization
    folder: Path
    """Where the model is saved."""

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


def train(
    run: Run, optimization: Optimization, task: Task, epochs: Batches, evaluate_every: int, planned: Epochs | None = None
) -> None:
    """Train for `optimization.total` updates; evaluate, keep the best model and write checkpoints in between.

    Args:
        epochs: the examples of each update.
        evaluate_every: updates between evaluations; 0: at the end of each epoch.
        planned: examples as large as those of `epochs`, whose largest micro-batch is tried first.
    """
    total, evaluate_every = optimization.total, evaluate_every or epochs.updates_per_epoch
    done, progress = checkpoint.load(run, optimization)
    best, evaluated = progress.get("best", math.inf), progress.get("evaluated")
    if planned and done < total:
        try_largest_micro_batch(run, optimization, task, planned)
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


def try_largest_micro_batch(run: Run, optimization: Optimization, task: Task, epochs: Epochs) -> None:
    """Run the largest micro-batch that is planned, before the first update, and report its peak of memory.

    Raises:
        UserError: if it does not fit.
    """
    shares_rows = isinstance(run.config, SequenceConfig) and run.config.sequence_parallel > 1
    if not run.memory.estimate or not optimization.can_try or shares_rows:
        return  # processes that share rows exchange within a pass: one that lacks memory would leave the other waiting
    largest: tuple[int, list[int], list[int]] = (0, [], [])
    for update in range(1, min(PLANNED_UPDATES, epochs.updates_per_epoch) + 1):
        rows = epochs.rows(update)
        lengths = [task.lengths[row] for row in rows]
        for batch in micro_batches(rows, lengths, run.config.micro_batch_tokens, run.accelerator):
            size = len(batch.rows) * max(task.lengths[row] for row in batch.rows)
            largest = max(largest, (size, batch.rows, rows))
    size, part, rows = largest
    measure_micro_batch(run, optimization, task.loss(rows), part, size)


def measure_micro_batch(
    run: Run, optimization: Optimization, loss: Callable[[list[int]], tuple[Tensor, Sums]], rows: list[int], size: int
) -> None:
    """Run a micro-batch of `size` padded tokens and report the peak of memory. Raises: UserError if it does not fit."""
    assert isinstance(run.config, ModelConfig)
    text = f"{size} tokens in {len(rows)} rows"
    run.say(f"trying the largest micro-batch: {text}")
    run.say(run.memory.measure(run.config, lambda: optimization.try_micro_batch(loss, rows), text, optimization.has_state))


def stop_on_nan(run: Run, update: int, error: NotFiniteError, batch: list[dict[str, object]]) -> None:
    """Save the batch that led to a NaN, and end the run with a UserError."""
    path = run.folder / f"broken-batch-{update}.json"
    if run.is_main:
        write_json(path, batch)
    raise UserError(
        f"update {update}: {error}; the weights before it are unharmed, the batch is in {path}. "
        "Lower learning_rate, or look at that batch"
    ) from error


Config = TypeVar("Config", bound=EpochConfig)


LABELS = ("ranks", "rules", "targets", "attributes")


class ExampleTask:
    """The common part of the stages' tasks: what is trained, on which examples, and where it is saved; see `Task`."""

    evaluate_before_training = False

    def __init__(
        self, run: Run, config: Any, loaded: LoadedModel, optimization: Optimization, examples: Any, held_out: Any
    ) -> None:
        self.run, self.config, self.loaded, self.optimization = run, config, loaded, optimization
        self.examples, self.held_out = examples, held_out
        self.shape = flops_profile(loaded.backbone, loaded.adapter)
        self.folder = run.folder / "model"

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        """The examples of a batch as texts with their labels, for finding the cause of a NaN."""
        text, found = self.loaded.tokenization.text, []
        for example in (self.examples[row] for row in rows):
            several = hasattr(example, "responses")
            answer = {"responses": list(map(text, example.responses))} if several else {"response": text(example.response)}
            labels = {name: getattr(example, name) for name in LABELS if hasattr(example, name)}
            found.append({"prompt": text(example.prompt), **answer, **labels})
        return found

    def card(self, title: str, metrics: Mapping[str, float], **more: str) -> dict[str, str]:
        """The facts of the model card."""
        card = {"title": title, "stage": self.run.stage, "data": self.config.train_data} | more
        return card | {name: f"{value:.4g}" for name, value in metrics.items()}


class EpochTrainer:
    """Base of a stage's trainer, whose constructor calls this one, then `make_optimization`, then sets `task`.

    All trainers take:

    - a model: a name or folder, a transformers model with its `tokenizer`, or a `LoadedModel`, whose adapter, if any, is
      called `policy`, or `reward` for models that judge;
    - `train_data`: a file, folder or hub name, or records in memory (`align.batches.encoding.Data`); several are a
      `Mixture`, or names separated by commas;
    - `config`: all other settings. Its `model` and its names of data are not read;
    - `validation_data`: held-out data, by which the best model is chosen.

    They raise a UserError for mistakes in the settings or the data.

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
    task: Task

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
        responses: Iterable[int] = (),
        frozen: Sequence[nn.Module] = (),
        stream: Batches | None = None,
    ) -> Optimization:
        """Build the training engine after checking available memory.

        Args:
            responses: number of responses to each example's prompt.
            frozen: other models that are kept.
            stream: examples that are read during training; `mixed` are then as large as they may be.
        """
        config = self.config
        say_if_prompts_are_repeated(self.run, self.loaded.backbone, responses)
        mixing = config if isinstance(config, MixtureConfig) else None
        digest = examples_digest(mixed.examples)
        self.epochs = Epochs(config.seed, config.batch_size, mixed.sizes, mixed.weights, mixing, digest)
        self.batches = stream or self.epochs
        assert isinstance(self.run.config, ModelConfig)
        self.run.say(self.run.memory.check(self.run.config, module, frozen))
        return make_optimization(self.run, module, self.batches.updates(config.epochs))

    def train(self) -> Path:
        """Train from the last checkpoint on; returns the folder of the best model."""
        train(self.run, self.task.optimization, self.task, self.batches, self.config.evaluate_every, self.epochs)
        self.run.close()
        return self.task.folder


def with_data_names(config: Config, **data: TrainingData) -> Config:
    """The settings with the names of the data that a trainer was given: a file's name, or the number of records."""
    return replace(config, **{name: data_name(given) for name, given in data.items()})  # type: ignore[arg-type]
