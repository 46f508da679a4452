"""Training of attribute models: what both forms share, and the head form, as in MT-DNN."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from align.batches.encoding import Limits
from align.batches.micro_batches import map_rows
from align.core.settings import MixtureConfig, option, require_setting
from align.core.statistics import correlation
from align.extras.attributes.judgments import EncodedTask, encode_ratings
from align.extras.attributes.model import AttributeModel, Head, head_losses, in_label_units, save_attribute_model
from align.extras.rules.judgments import JudgedResponse, ScoredJudgment, rule_metrics
from align.models.backbone import require_classifier
from align.models.checkpoint import weights_of
from align.models.heads import freeze_unused_lm_head
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER
from align.reward.loss import Pairs, pairs_of, ranking_loss
from align.reward.rankings import group_flops, group_sizes, reward_rankings
from align.runtime.distributed import run_on_main
from align.training.data_order import JudgmentConfig
from align.training.engine import Sums
from align.training.loop import ExampleTask


@dataclass(kw_only=True)
class AttributeConfig(MixtureConfig, JudgmentConfig):
    """Several heads on one trunk: attributes of responses, and a preference (MT-DNN, Liu et al. 2019)."""

    train_data: str = option(
        "", "attribute judgments to learn from: file, folder or hub name; several are separated by commas, NAME=WEIGHT"
    )
    rankings: str = option(
        "", "rankings or pairs for another head, called `preference`; several as in train_data; empty: no such head"
    )
    validation_data: str = option(
        "", "held-out attribute judgments: metrics, and the choice of the best model; empty: held_out_share of train_data's"
    )
    form: Literal["heads", "generative"] = option(
        "heads",
        "how attributes are computed: heads (a head each; for any model) or generative (as in LaMDA, the model writes "
        "the rating after an attribute's name; for a model that generates text, which also learns to write responses)",
    )
    generator_filter: str = option(
        "",
        "with form generative: a response is learned if its attributes pass this, such as unsafe<0.5, sensible>0.5; empty: "
        "all responses are",
    )
    heads: list[str] = option(
        [],
        "attributes that get a head, each as NAME, NAME=binary (0 or 1) or NAME=scale (1 to 7); empty: all in the data; "
        "without a kind, scale if a value is above 1",
    )
    epochs: int = option(1, "passes over all examples")
    batch_size: int = option(16, "responses and rankings in one update, over all processes")

    def __post_init__(self) -> None:
        super().__post_init__()
        generative = self.form == "generative"
        require_setting(self, "generator_filter", generative or not self.generator_filter, "empty unless form is generative")
        require_setting(self, "rankings", not (generative and self.rankings), "empty: form generative has no head for them")


class AttributeTask(ExampleTask, ABC):
    """The common part of both forms' tasks, which add the loss and the model.

    Args:
        heads: the attributes.
    """

    config: AttributeConfig

    def __init__(self, *arguments: Any, heads: list[Head]) -> None:
        super().__init__(*arguments)
        self.heads = heads
        self.lengths = self.sizes(self.loaded, self.examples)

    @staticmethod
    @abstractmethod
    def sizes(loaded: LoadedModel, examples: Sequence[Any]) -> list[int]:
        """Tokens that each example holds in memory."""

    @abstractmethod
    def judge(self, examples: Sequence[Any]) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The model's predictions for rated responses, on every process.

        Returns:
            Predictions in labelers' units [R, n], the loss of each head summed over the responses it was judged on [n], and
            further losses that count in the choice of the best model, by name.
        """

    @abstractmethod
    def write_model(self, weights: dict[str, Tensor], state: Any, card: dict[str, Any]) -> None:
        """Save the model from the weights of the backbone's model and the state of all that was trained."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        found = {"loss": sums["loss"]} | {f"head/{head.name}": sums[f"head/{head.name}"] for head in self.heads}
        found |= {"loss/generator": sums["generator"]} if "generator" in sums else {}
        return found | {"tokens/read": sums["read"]}

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
        state = self.engine.model_state()

        def write() -> None:
            data = ", ".join(name for name in (self.config.train_data, self.config.rankings) if name)
            card = self.card("Attribute model", metrics, data=data)
            self.write_model(weights_of(self.loaded.backbone, state, "backbone.model."), state, card)

        run_on_main(write, self.run.accelerator)


def targets_of(examples: Sequence[Any], heads: Sequence[Head]) -> Tensor:
    """The `attributes` of examples as [R, n]: NaN where a head was not judged."""
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


class HeadTask(AttributeTask):
    """Attributes of responses and rankings, by one head each on one trunk."""

    adapter, writes = REWARD_ADAPTER, False

    def __init__(self, *arguments: Any, heads: list[Head]) -> None:
        super().__init__(*arguments, heads=heads)
        self.binary = torch.tensor([head.kind == "binary" for head in self.heads])
        self.ranking = next((number for number, head in enumerate(self.heads) if head.kind == "ranking"), None)

    @staticmethod
    def build(config: AttributeConfig, loaded: LoadedModel, heads: list[Head]) -> AttributeModel:
        require_classifier(loaded.backbone)
        freeze_unused_lm_head(loaded.backbone)
        return AttributeModel(loaded.backbone, heads, loaded.adapter)

    @staticmethod
    def encode(
        config: AttributeConfig, rated: Sequence[JudgedResponse], module: Any, loaded: LoadedModel, limits: Limits
    ) -> list[EncodedTask]:
        return encode_ratings(rated, module.heads, loaded, limits)

    @staticmethod
    def sizes(loaded: LoadedModel, examples: Sequence[EncodedTask]) -> list[int]:
        return group_sizes(loaded.backbone, examples)

    def _targets(self, examples: Sequence[EncodedTask]) -> Tensor:
        """[R, n] of all responses, those of rankings too."""
        return targets_of([item for item in examples for _ in item.responses], self.heads)

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        batch = [self.examples[row] for row in rows]
        # Each head's loss is a mean over its judged responses in the global batch; every head has the same weight.
        counts = (~self._targets(batch).isnan()).sum(0).float()
        if self.ranking is not None:
            counts[self.ranking] = sum(bool(item.ranks) for item in batch)

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            examples = [self.examples[row] for row in part]
            outputs = reward_rankings(self.engine.module, examples, self.run.accelerator.device)
            device = outputs.device
            losses = head_losses(outputs, self._targets(examples).to(device), self.binary.to(device))
            if self.ranking is not None:
                ranks = [item.ranks or [1] * len(item.responses) for item in examples]
                pairs = Pairs(*(column.to(device) for column in pairs_of(ranks)))
                ranking = ranking_loss(outputs[:, self.ranking], pairs)
                losses = losses + ranking * one_hot(torch.tensor(self.ranking, device=device), len(self.heads))
            means = losses / counts.to(device).clamp(min=1)
            flops = sum(group_flops(self.loaded.backbone, self.shape, item) for item in examples)
            return means.sum(), {
                **{f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)},
                "read": torch.full_like(means[0], sum(self.sizes(self.loaded, examples))),
                "flops": torch.tensor(flops, dtype=torch.float64, device=device),
            }

        return loss_of_rows

    def judge(self, examples: Sequence[EncodedTask]) -> tuple[Tensor, Tensor, dict[str, float]]:
        def score_rows(rows: list[int]) -> list[list[float]]:
            part, device = [examples[row] for row in rows], self.run.accelerator.device
            outputs: list[list[float]] = reward_rankings(self.engine.module, part, device).tolist()
            return outputs

        sizes = self.sizes(self.loaded, examples)
        outputs = torch.tensor(map_rows(sizes, self.config.micro_batch_tokens, self.run.accelerator, score_rows))
        losses = head_losses(outputs, self._targets(examples), self.binary)
        return in_label_units(outputs, self.heads), losses, {}

    def write_model(self, weights: dict[str, Tensor], state: Any, card: dict[str, Any]) -> None:
        save_attribute_model(self.folder, self.loaded, weights, state, self.heads, card)
