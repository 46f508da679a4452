"""The head form: a head computes a number for each attribute at the end of the response, as in MT-DNN."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from align.attributes.config import AttributeConfig
from align.attributes.judgments import EncodedTask, RatedResponse, encode_ratings
from align.attributes.loss import head_losses
from align.attributes.model import AttributeModel, Head, in_label_units, save_attribute_model
from align.attributes.tasks import AttributeTask, targets_of
from align.batches.encoding import Limits
from align.batches.micro_batches import map_rows
from align.core.errors import UserError
from align.models.backbone import require_classifier
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER, freeze_unused_lm_head
from align.reward.loss import Pairs, pairs_of, ranking_loss
from align.reward.scoring import batch_shape_of, group_flops, group_sizes, reward_rankings
from align.training.memory_dry_run import BatchShape
from align.training.optimization import Sums


class HeadTask(AttributeTask[EncodedTask]):
    """Attributes of responses and rankings, each with a head of its own on one trunk."""

    adapter: ClassVar[str] = REWARD_ADAPTER
    writes: ClassVar[bool] = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.binary = torch.tensor([head.kind == "binary" for head in self.heads])
        self.ranking = next((number for number, head in enumerate(self.heads) if head.kind == "ranking"), None)

    @staticmethod
    def build(config: AttributeConfig, loaded: LoadedModel, heads: list[Head]) -> AttributeModel:
        require_classifier(loaded.backbone)
        if config.gate:
            _require_gate(loaded, heads)
        freeze_unused_lm_head(loaded.backbone)
        return AttributeModel(loaded.backbone, heads, loaded.adapter, config.gate)

    @staticmethod
    def encode(
        config: AttributeConfig, rated: Sequence[RatedResponse], module: Any, loaded: LoadedModel, limits: Limits
    ) -> list[EncodedTask]:
        return encode_ratings(rated, module.heads, loaded, limits)

    @staticmethod
    def sizes(loaded: LoadedModel, examples: Sequence[EncodedTask]) -> list[int]:
        return group_sizes(loaded.backbone, examples)

    @staticmethod
    def batch_shape(batch: Sequence[EncodedTask]) -> BatchShape:
        return batch_shape_of(batch)

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
            outputs = reward_rankings(self.optimization.module, examples, self.run.accelerator.device)
            device = outputs.device
            losses = head_losses(outputs, self._targets(examples).to(device), self.binary.to(device))
            if self.ranking is not None:
                ranks = [item.ranks or [1] * len(item.responses) for item in examples]
                pairs = Pairs(*(column.to(device) for column in pairs_of(ranks, [0.0] * len(ranks))))
                ranking = ranking_loss(outputs[:, self.ranking], pairs)
                losses = losses + ranking * torch.nn.functional.one_hot(
                    torch.tensor(self.ranking, device=device), len(self.heads)
                )
            means = losses / counts.to(device).clamp(min=1)
            flops = sum(group_flops(self.loaded.backbone, self.shape, item) for item in examples)
            return means.sum(), {
                **{f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)},
                "read": torch.full_like(means[0], sum(self.sizes(self.loaded, examples))),
                "flops": torch.tensor(flops, dtype=torch.float64, device=device),
            }

        return loss_of_rows

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        heads = {f"head/{head.name}": sums[f"head/{head.name}"] for head in self.heads}
        return {"loss": sums["loss"], **heads, "tokens/read": sums["read"]}

    def judge(self, examples: Sequence[EncodedTask]) -> tuple[Tensor, Tensor, dict[str, float]]:
        read = partial(reward_rankings, self.optimization.module, device=self.run.accelerator.device)

        def score_rows(rows: list[int]) -> list[list[float]]:
            outputs: list[list[float]] = read([examples[row] for row in rows]).tolist()
            return outputs

        sizes = self.sizes(self.loaded, examples)
        outputs = torch.tensor(map_rows(sizes, self.config.micro_batch_tokens, self.run.accelerator, score_rows))
        losses = head_losses(outputs, self._targets(examples), self.binary)
        return in_label_units(outputs, self.heads), losses, {}

    def write_model(self, folder: Path, weights: dict[str, Tensor], state: Any, card: dict[str, Any]) -> None:
        save_attribute_model(folder, self.loaded, weights, state, self.heads, card)

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        text = self.loaded.tokenization.text
        return [
            {
                "prompt": text(item.prompt),
                "responses": [text(ids) for ids in item.responses],
                "attributes": dict(item.attributes),
                "ranks": item.ranks,
            }
            for item in (self.examples[row] for row in rows)
        ]


def _require_gate(loaded: LoadedModel, heads: list[Head]) -> None:
    if not loaded.backbone.reads_prompts_alone:
        model_type = loaded.backbone.model.config.model_type
        raise UserError(
            f"gate: model type '{model_type}' has no state of a prompt alone (an encoder) to weigh by; leave it off"
        )
    if heads[-1].kind != "ranking" or len(heads) < 3:
        raise UserError("gate: give rankings that it can learn from, and at least two attributes that it can weigh")
