"""The common base of trainers that make several passes over fixed examples."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from align.batches.identity import examples_digest
from align.batches.mixtures import MixedExamples, TrainingData, data_name
from align.core.settings import MixtureConfig
from align.models.loading import LoadedModel
from align.training.epochs import Batches, EpochConfig, Epochs, parse_ramp
from align.training.factory import make_optimization
from align.training.loop import Task, check_memory, train
from align.training.memory_dry_run import BatchShape, RolePass
from align.training.optimization import Optimization
from align.training.run import Run
from align.training.start import Model, open_run, say_if_prompts_are_repeated

Example = TypeVar("Example")
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
