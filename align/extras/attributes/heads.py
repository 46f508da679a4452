"""Attribute models with one head per attribute and one for preference, on a shared backbone (MT-DNN)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from align.batches.encoding import Data, Limits, encode_rankings
from align.batches.micro_batches import map_rows
from align.core.statistics import correlation
from align.core.tensor_ops import BatchLoss
from align.extras.attributes.model import AttributeModel, Form, Head, head_losses, in_label_units
from align.extras.rules.judgments import JudgedResponse, ScoredJudgment, encoded_responses, rule_metrics
from align.models.backbone import flops_profile, require_classifier
from align.models.checkpoint import save_model, weights_of
from align.models.loading import LoadedModel, freeze_unused_lm_head
from align.reward.checkpoint import ATTRIBUTE, save_reward_model
from align.reward.loss import pairs_of, ranking_loss
from align.reward.rankings import group_flops, group_sizes, reward_rankings
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import PromptResponse, TokenIds
from align.training.engine import TrainEngine


@dataclass(frozen=True)
class EncodedTask:
    """An example of one task: a response with its attributes, or the responses of a ranking with their ranks [K]."""

    prompt: TokenIds
    responses: list[TokenIds]
    attributes: Mapping[str, float] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)


class AttributeForm:
    """Shared part of both forms of attribute models; see `RuleForm`. Subclasses define the loss and the predictions."""

    form: Form
    evaluates_start = False

    def __init__(self, loaded: LoadedModel, heads: list[Head]) -> None:
        self.loaded, self.profile, self.heads = loaded, flops_profile(loaded.backbone, loaded.adapter), heads
        self.measure: dict[str, Any] = {"heads": [f"{head.name}={head.kind}" for head in heads]}

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Compute the metrics of an update from sums over its micro-batches."""
        return sums

    def judge(self, engine: TrainEngine, examples: list[Any], budget: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Predict the attributes of rated responses. Identical on every process.

        Returns:
            Predictions [B, n] in labelers' units, the loss [n] of each head, summed over the responses it was judged on, and
            further losses that count in the choice of the best model, by name.
        """
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, engine: TrainEngine, held_out: list[Any], budget: int) -> dict[str, float]:
        """Return metrics on held-out responses. Identical on every process."""
        if not held_out:
            return {}
        predicted, losses, extra_losses = self.judge(engine, held_out, budget)
        targets = targets_of(held_out, self.heads)
        judged = ~targets.isnan()
        counts = judged.sum(0)
        metrics = {"validation/loss": float((losses / counts.clamp(min=1)).sum()) + sum(extra_losses.values())}
        metrics |= {f"validation/{name}": value for name, value in extra_losses.items()}
        for number, head in enumerate(self.heads):
            rows = judged[:, number]
            if rows.any():
                found = head_metrics(head, predicted[rows, number], targets[rows, number])
                metrics |= {f"validation/head/{head.name}/{name}": value for name, value in found.items()}
        return metrics

    def save(self, engine: TrainEngine, data: str, metrics: dict[str, float]) -> None:
        """Save the model as the run's result.

        A transformers classifier reads the first head of the form `heads`. The form `generative` is a language model.
        """
        run, state, folder = engine.run, engine.model_state(), engine.run.folder / "model"

        def write() -> None:
            card, weights = run.card("Attribute model", data, metrics), weights_of(self.loaded.backbone, state)
            metadata = {"form": self.form, "heads": list(map(asdict, self.heads)), "mean": 0.0}
            if self.form == "generative":
                save_model(folder, self.loaded, weights, card, {ATTRIBUTE.metadata_file: metadata})
                return
            weight, tensors = state["linear.weight"], {"heads": state["linear.weight"], "biases": state["linear.bias"]}
            save_reward_model(folder, self.loaded, weights, weight[:1], metadata, card, ATTRIBUTE, tensors)

        run_on_main(write, run.accelerator)


class HeadForm(AttributeForm):
    """Attribute model with one head per attribute."""

    form = "heads"

    def __init__(self, loaded: LoadedModel, heads: list[Head]) -> None:
        super().__init__(loaded, heads)
        self.binary = torch.tensor([head.kind == "binary" for head in heads])
        self.ranking = next((number for number, head in enumerate(heads) if head.kind == "ranking"), None)

    def sizes(self, examples: Sequence[Any]) -> list[int]:
        """Return the number of tokens in memory per example."""
        return group_sizes(self.loaded.backbone, examples)

    def flops(self, example: Any) -> float:
        """Return the training FLOPs of an example."""
        return group_flops(self.loaded.backbone, self.profile, example)

    def build_module(self) -> nn.Module:
        """Return the module to train."""
        require_classifier(self.loaded.backbone)
        freeze_unused_lm_head(self.loaded.backbone)
        return AttributeModel(self.loaded.backbone, self.heads, self.loaded.adapter)

    def encode(self, rated: Sequence[JudgedResponse], limits: Limits) -> list[EncodedTask]:
        """Encode rated responses as examples. Raise a UserError if a text exceeds the limits or the context length."""
        found = []
        for where, encoded, item in encoded_ratings(rated, self.heads, self.loaded, limits):
            self.loaded.backbone.require_fit(len(encoded.prompt), len(encoded.response), where)
            found.append(EncodedTask(encoded.prompt, [encoded.response], item.targets))
        return found

    def batch_loss(self, model: nn.Module, device: torch.device, examples: Sequence[Any], batch: Sequence[Any]) -> BatchLoss:
        """Return a micro-batch's contribution to the loss, in total and per head.

        Each head's loss is a mean over its judged responses in the global batch; every head has the same weight.
        """
        counts = (~targets_of_responses(batch, self.heads).isnan()).sum(0).float()
        if self.ranking is not None:
            counts[self.ranking] = sum(bool(item.ranks) for item in batch)
        outputs = reward_rankings(model, examples, device)
        losses = head_losses(outputs, targets_of_responses(examples, self.heads).to(device), self.binary.to(device))
        if self.ranking is not None:
            ranks = [item.ranks or [1] * len(item.responses) for item in examples]
            ranking = ranking_loss(outputs[:, self.ranking], pairs_of(ranks).to(device))
            losses = losses + ranking * one_hot(torch.tensor(self.ranking, device=device), len(self.heads))
        means = losses / counts.to(device).clamp(min=1)
        sums = {f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)}
        return BatchLoss(means.sum(), sums)

    def judge(self, engine: TrainEngine, examples: list[Any], budget: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        def score_rows(rows: list[int]) -> list[list[float]]:
            part = [examples[row] for row in rows]
            outputs: list[list[float]] = reward_rankings(engine.module, part, engine.accelerator.device).tolist()
            return outputs

        outputs = torch.tensor(map_rows(self.sizes(examples), budget, engine.accelerator, score_rows))
        losses = head_losses(outputs, targets_of_responses(examples, self.heads), self.binary)
        return in_label_units(outputs, self.heads), losses, {}


def head_metrics(head: Head, predicted: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute the metrics of one head on held-out responses, defined in docs/rules.md."""
    if head.kind == "binary":
        metrics = rule_metrics(list(map(ScoredJudgment, [""] * len(targets), predicted.tolist(), targets.tolist())))
        return {name: metrics[name] for name in ("auc", "balanced_accuracy", "calibration_error") if name in metrics}
    return {
        "error": float((predicted - targets).abs().mean()),
        "correlation": correlation(predicted.numpy(), targets.numpy()),
    }


def targets_of_responses(examples: Sequence[EncodedTask], heads: Sequence[Head]) -> Tensor:
    """Return the targets [B, n] of all responses, including the responses of rankings."""
    return targets_of([item for item in examples for _ in item.responses], heads)


def targets_of(examples: Sequence[Any], heads: Sequence[Head]) -> Tensor:
    """Return the attributes of examples [B, n], NaN for heads without a judgment."""
    return torch.tensor([[item.attributes.get(head.name, torch.nan) for head in heads] for item in examples])


def encoded_ratings(
    rated: Sequence[JudgedResponse], heads: Sequence[Head], loaded: LoadedModel, limits: Limits
) -> Iterator[tuple[str, PromptResponse, JudgedResponse]]:
    """Yield responses with an attribute of one of the heads, restricted to these attributes; see `encoded_responses`."""
    names = {head.name for head in heads if head.kind != "ranking"}
    known = [(item, {name: value for name, value in item.targets.items() if name in names}) for item in rated]
    judged = [JudgedResponse(item.prompt, item.response, targets) for item, targets in known if targets]
    return encoded_responses(judged, loaded, limits, "attribute judgments")


def encode_preferences(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedTask]:
    """Encode rankings as examples of the preference head. Raises as `encode_rankings`."""
    rankings = encode_rankings(data, loaded, limits, skip_bad_rows)
    return [EncodedTask(item.prompt, item.responses, ranks=item.ranks) for item in rankings]
