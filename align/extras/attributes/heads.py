"""The head form of attribute models, as in MT-DNN: attributes of responses and rankings, by one head each on one trunk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from align.batches.encoding import Limits
from align.batches.micro_batches import map_rows
from align.extras.attributes.judgments import EncodedTask, encode_ratings
from align.extras.attributes.model import AttributeModel, Head, head_losses, in_label_units, save_attribute_model
from align.extras.rules.judgments import JudgedResponse
from align.models.backbone import flops_profile, require_classifier
from align.models.heads import freeze_unused_lm_head
from align.models.loading import LoadedModel
from align.reward.loss import pairs_of, ranking_loss
from align.reward.rankings import group_flops, group_sizes, reward_rankings
from align.training.engine import TrainEngine


class HeadForm:
    """What training by heads means; `GenerativeForm` has the same methods.

    Args:
        heads: the attributes.
    """

    def __init__(self, loaded: LoadedModel, heads: list[Head]) -> None:
        self.loaded, self.heads = loaded, heads
        self.binary = torch.tensor([head.kind == "binary" for head in heads])
        self.ranking = next((number for number, head in enumerate(heads) if head.kind == "ranking"), None)
        self.profile = flops_profile(loaded.backbone, loaded.adapter)

    def build_module(self) -> nn.Module:
        """Return the module that is trained."""
        require_classifier(self.loaded.backbone)
        freeze_unused_lm_head(self.loaded.backbone)
        return AttributeModel(self.loaded.backbone, self.heads, self.loaded.adapter)

    def encode(self, rated: Sequence[JudgedResponse], limits: Limits) -> list[EncodedTask]:
        """Return rated responses as examples."""
        return encode_ratings(rated, self.heads, self.loaded, limits)

    def sizes(self, examples: Sequence[EncodedTask]) -> list[int]:
        """Return the tokens that each example holds in memory."""
        return group_sizes(self.loaded.backbone, examples)

    def flops(self, example: EncodedTask) -> float:
        """Return the FLOPs of learning from an example."""
        return group_flops(self.loaded.backbone, self.profile, example)

    def batch_loss(
        self, model: nn.Module, device: torch.device, examples: Sequence[EncodedTask], batch: Sequence[EncodedTask]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's share of the loss, and that of each head.

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
        return means.sum(), {f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)}

    def judge(
        self, engine: TrainEngine, examples: Sequence[EncodedTask], budget: int
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return the model's predictions for rated responses, on every process.

        Returns:
            Predictions in labelers' units [B, n], the loss of each head summed over the responses it was judged on [n], and
            further losses that count in the choice of the best model, by name.
        """

        def score_rows(rows: list[int]) -> list[list[float]]:
            part = [examples[row] for row in rows]
            outputs: list[list[float]] = reward_rankings(engine.module, part, engine.accelerator.device).tolist()
            return outputs

        outputs = torch.tensor(map_rows(self.sizes(examples), budget, engine.accelerator, score_rows))
        losses = head_losses(outputs, targets_of_responses(examples, self.heads), self.binary)
        return in_label_units(outputs, self.heads), losses, {}

    def save(self, folder: Path, weights: dict[str, Tensor], state: Any, card: dict[str, Any]) -> None:
        """Save the model from the weights of the backbone's model and the state of all that was trained."""
        save_attribute_model(folder, self.loaded, weights, state, self.heads, card)


def targets_of_responses(examples: Sequence[EncodedTask], heads: Sequence[Head]) -> Tensor:
    """Return the targets [B, n] of all responses, those of rankings too."""
    return targets_of([item for item in examples for _ in item.responses], heads)


def targets_of(examples: Sequence[Any], heads: Sequence[Head]) -> Tensor:
    """Return the `attributes` of examples as [B, n]: NaN where a head was not judged."""
    return torch.tensor([[item.attributes.get(head.name, torch.nan) for head in heads] for item in examples])
