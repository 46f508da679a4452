"""What the training of both forms of an attribute model shares: figures on held-out responses, and how they are reported."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from align.attributes.config import AttributeConfig
from align.attributes.judgments import RatedResponse
from align.attributes.model import Head
from align.batches.encoding import Limits
from align.core.statistics import correlation
from align.models.backbone import flops_profile
from align.models.checkpoint import weights_of
from align.models.loading import LoadedModel
from align.rules.metrics import ScoredJudgment, rule_metrics
from align.runtime.distributed import run_on_main
from align.training.memory_dry_run import BatchShape
from align.training.optimization import Optimization, Sums
from align.training.run import Run


class Rated(Protocol):
    """An example with the means over labelers of its attributes."""

    @property
    def attributes(self) -> Any:
        """By name."""


Example = TypeVar("Example", bound=Rated)


class AttributeTask(ABC, Generic[Example]):
    """Examples, losses and evaluation of an attribute model, as `align.training.loop.train` asks for them.

    Args:
        examples: to learn from.
        held_out: rated responses to evaluate on.
        heads: the attributes.
    """

    evaluate_before_training = False
    adapter: ClassVar[str]
    """What the trained adapter is called."""
    writes: ClassVar[bool]
    """Whether the model writes text too, and needs its vocabulary matrix."""

    def __init__(
        self,
        run: Run,
        config: AttributeConfig,
        loaded: LoadedModel,
        optimization: Optimization,
        examples: list[Example],
        held_out: list[Example],
        heads: list[Head],
    ) -> None:
        self.run, self.config, self.loaded, self.optimization = run, config, loaded, optimization
        self.examples, self.held_out, self.heads = examples, held_out, heads
        self.lengths = self.sizes(loaded, examples)
        self.shape = flops_profile(loaded.backbone, loaded.adapter)
        self.folder = run.folder / "model"

    @staticmethod
    @abstractmethod
    def build(config: AttributeConfig, loaded: LoadedModel, heads: list[Head]) -> nn.Module:
        """The module that is trained. Raises: UserError for a model that cannot be."""

    @staticmethod
    @abstractmethod
    def encode(
        config: AttributeConfig, rated: Sequence[RatedResponse], module: Any, loaded: LoadedModel, limits: Limits
    ) -> list[Example]:
        """Rated responses as examples. Raises: UserError for what does not fit."""

    @staticmethod
    @abstractmethod
    def sizes(loaded: LoadedModel, examples: Sequence[Example]) -> list[int]:
        """Tokens that each example holds in memory."""

    @staticmethod
    @abstractmethod
    def batch_shape(batch: Sequence[Example]) -> BatchShape:
        """The shape of a micro-batch."""

    @abstractmethod
    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        """See `align.training.loop.Task`."""

    @abstractmethod
    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """See `align.training.loop.Task`."""

    @abstractmethod
    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        """See `align.training.loop.Task`."""

    @abstractmethod
    def judge(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The model's predictions for rated responses, on every process.

        Returns:
            Predictions in labelers' units [R, n], the loss of each head summed over the responses it was judged on [n], and
            further losses that count in the choice of the best model, by name.
        """

    @abstractmethod
    def write_model(self, folder: Path, weights: dict[str, Tensor], state: Any, card: dict[str, Any]) -> None:
        """Save the model.

        Args:
            weights: of the backbone's model.
            state: all that was trained.
        """

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        predicted, losses, extra_losses = self.judge(self.held_out)
        targets = targets_of(self.held_out, self.heads)
        judged = ~targets.isnan()
        counts = judged.sum(0)
        metrics = {"validation/loss": float((losses / counts.clamp(min=1)).sum()) + sum(extra_losses.values())}
        metrics |= {f"validation/{name}": value for name, value in extra_losses.items()}
        for number, head in enumerate(self.heads):
            if not counts[number]:
                continue
            rows = judged[:, number]
            figures = _figures(head, predicted[rows, number], targets[rows, number])
            metrics |= {f"validation/head/{head.name}/{name}": value for name, value in figures.items()}
        return metrics

    def save(self, metrics: dict[str, float]) -> None:
        state = self.optimization.model_state()

        def write() -> None:
            data = ", ".join(name for name in (self.config.train_data, self.config.rankings) if name)
            card = {"title": "Attribute model", "stage": "attributes", "data": data}
            card |= {name: f"{value:.4g}" for name, value in metrics.items()}
            self.write_model(self.folder, weights_of(self.loaded.backbone, state, "backbone.model."), state, card)

        run_on_main(write, self.run.accelerator)


def targets_of(examples: Sequence[Rated], heads: Sequence[Head]) -> Tensor:
    """[R, n] of responses that were rated: NaN where a head was not judged."""
    return torch.tensor([[item.attributes.get(head.name, torch.nan) for head in heads] for item in examples])


def _figures(head: Head, predicted: Tensor, targets: Tensor) -> dict[str, float]:
    """The reported figures of one head on held-out responses; docs/rules.md defines each."""
    if head.kind == "binary":
        scored = [ScoredJudgment("", *pair) for pair in zip(predicted.tolist(), targets.tolist(), strict=True)]
        found = rule_metrics(scored)
        return {name: found[name] for name in ("auc", "balanced_accuracy", "calibration_error") if name in found}
    return {
        "error": float((predicted - targets).abs().mean()),
        "correlation": correlation(predicted.numpy(), targets.numpy()),
    }
