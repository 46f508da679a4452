"""The training loop of supervised fine-tuning, reward models and DPO: epochs over fixed examples, keeping the best model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.micro_batches import micro_batches
from align.batches.mixtures import MixedExamples
from align.core.settings import MixtureConfig, ModelConfig
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.runtime.flops import Clock
from align.training.best_model import BestModel
from align.training.broken_batch import examples_as_text, stop_on_nan
from align.training.checkpoint import Checkpoint
from align.training.data_order import DataOrder, EpochConfig
from align.training.engine import NotFiniteError, Sums, TrainEngine
from align.training.run import Run
from align.training.start import Model, build_engine, open_run, say_if_prompts_are_repeated
from align.training.trial import PLANNED_UPDATES, can_try, largest_micro_batch, memory_trial

Example = TypeVar("Example")


class Task(Protocol):
    """What a stage defines: its examples, its loss, its evaluation."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each training example by its row; those that are read or made for an update change with it."""

    evaluate_before_training: bool
    """Whether to evaluate before the first update, too: with a new head, those metrics mean nothing."""
    engine: TrainEngine
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
    run: Run, engine: TrainEngine, task: Task, epochs: Any, evaluate_every: int, planned: DataOrder[Any] | None = None
) -> None:
    """Train for `engine.total_steps` updates; evaluate, keep the best model and write checkpoints in between.

    Args:
        epochs: the examples of each update.
        evaluate_every: updates between evaluations; 0: at the end of each epoch.
        planned: examples as large as those of `epochs`, whose largest micro-batch is tried first.
    """
    total, evaluate_every = engine.total_steps, evaluate_every or epochs.updates_per_epoch
    best = BestModel(run)
    checkpoint = Checkpoint(run, engine, {"batches": epochs, "best": best})
    done = checkpoint.load()
    if planned and done < total and can_try(engine):
        batches = (planned.rows(update) for update in range(1, min(PLANNED_UPDATES, planned.updates_per_epoch) + 1))
        batch, part, tokens = largest_micro_batch(engine, ((rows, [task.lengths[row] for row in rows]) for rows in batches))
        with memory_trial(engine, part, tokens):
            engine.backward(*task.loss(batch)([batch[row] for row in part]))
    if not done and task.evaluate_before_training:
        run.log(0, task.evaluate())

    for update in run.updates(done + 1, total, checkpoint):
        rows = epochs.rows(update)
        plan = micro_batches(rows, [task.lengths[row] for row in rows], run.config.micro_batch_tokens, run.accelerator)
        clock = Clock()
        try:
            loss = task.loss(rows)
            for part in engine.micro_batches(plan):
                engine.backward(*loss(part))
            clock.lap("learn")
            step = engine.step(update)
            clock.lap("step")
        except NotFiniteError as error:
            stop_on_nan(run, update, error, task.describe(rows))
        metrics = task.metrics(engine.sums) | step
        if "flops" in engine.sums:
            flops = engine.sums["flops"]
            metrics |= {"flops": flops} | run.speed(metrics["tokens/read"], flops, sum(clock.seconds.values()))
        if update % evaluate_every == 0 or update == total:
            metrics |= task.evaluate()
            if best.improves(update, metrics):
                task.save(metrics)
            clock.lap("validate")
        run.log(update, metrics | clock.shares())
        run.note(best.note(metrics["loss"]))
    if best.needs_evaluation(done, total):
        metrics = task.evaluate()
        if best.improves(total, metrics):
            task.save(metrics)


class ExampleTask:
    """The common part of the stages' tasks: what is trained, on which examples, and where it is saved; see `Task`."""

    evaluate_before_training = False

    def __init__(
        self, run: Run, config: Any, loaded: LoadedModel, engine: TrainEngine, examples: Any, held_out: Any
    ) -> None:
        self.run, self.config, self.loaded, self.engine = run, config, loaded, engine
        self.examples, self.held_out = examples, held_out
        self.shape = flops_profile(loaded.backbone, loaded.adapter)
        self.folder = run.folder / "model"

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        """The examples of a batch as texts with their labels, for finding the cause of a NaN."""
        return examples_as_text([self.examples[row] for row in rows], self.loaded.tokenization)

    def card(self, title: str, metrics: Mapping[str, float], **more: str) -> dict[str, str]:
        """The facts of the model card."""
        return self.run.card(title, more.pop("data", self.config.train_data), metrics, **more)


class EpochTrainer:
    """Base of a stage's trainer, whose constructor calls this one, then `build_engine`, then sets `task`.

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
    epochs: DataOrder[Any]
    batches: Any
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

    def build_engine(
        self,
        module: nn.Module,
        mixed: MixedExamples[Example],
        responses: Iterable[int] = (),
        frozen: Sequence[nn.Module] = (),
        stream: Any = None,
    ) -> TrainEngine:
        """Build the training engine after checking available memory.

        Args:
            responses: number of responses to each example's prompt.
            frozen: other models that are kept.
            stream: examples that are read during training; `mixed` are then as large as they may be.
        """
        config = self.config
        say_if_prompts_are_repeated(self.run, self.loaded.backbone, responses)
        mixing = config if isinstance(config, MixtureConfig) else None
        self.epochs = DataOrder(mixed, config.seed, config.batch_size, mixing)
        self.batches = stream or self.epochs
        assert isinstance(self.run.config, ModelConfig)
        self.run.say(self.run.memory.check(self.run.config, module, frozen))
        return build_engine(self.run, module, self.batches.updates(config.epochs))

    def train(self) -> Path:
        """Train from the last checkpoint on; returns the folder of the best model."""
        train(self.run, self.task.engine, self.task, self.batches, self.config.evaluate_every, self.epochs)
        self.run.close()
        return self.task.folder
