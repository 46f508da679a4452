"""Attribute models: examples of all tasks are mixed and shuffled, and each task has a loss of its own (MT-DNN)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from align.attributes.config import AttributeConfig
from align.attributes.judgments import (
    EncodedTask,
    choose_heads,
    encode_preferences,
    encode_ratings,
    read_ratings,
    split_ratings,
)
from align.attributes.loss import head_losses
from align.attributes.model import AttributeModel, Head, in_label_units, save_attribute_model
from align.batches.encoding import Data, MixedExamples, TrainingData, encode_mixture
from align.batches.micro_batches import map_rows
from align.errors import UserError
from align.models.backbone import flops_profile
from align.models.checkpoint import weights_of
from align.models.loading import LoadedModel
from align.models.roles import freeze_unused_lm_head
from align.reward.head_trainer import HeadTrainer
from align.reward.loss import Pairs, pairs_of, ranking_loss
from align.reward.scoring import group_flops, group_sizes, reward_rankings
from align.rules.metrics import ScoredJudgment, rule_metrics
from align.statistics import correlation
from align.training.optimization import Optimization, Sums
from align.training.run import Run
from align.training.start import Model
from align.training.trainer import with_data_names


class AttributeTrainer(HeadTrainer):
    """Training of several heads on one trunk.

        rows = [{"prompt": "Hi", "response": "Hello!", "attributes": {"sensible": 1, "unsafe": 0, "rating": 6}}]
        folder = AttributeTrainer("smollm2-135m", rows, AttributeConfig(output_dir="runs/attributes")).train()

    Args:
        model: a name or folder, a transformers model, or a `LoadedModel` whose adapter, if any, is called `reward`.
        train_data: attribute judgments: a source, or several as a `Mixture` or names separated by commas.
        config: all other settings; its `model`, `train_data`, `rankings` and `validation_data` are not read.
        validation_data: held-out judgments, by which the best model is chosen; empty: a share of `train_data`.
        rankings: rankings for a head called `preference`, as sources of their own.
        tokenizer: of a transformers model.

    Raises:
        UserError: for anything that the settings or the data have wrong.
    """

    def __init__(
        self,
        model: Model,
        train_data: TrainingData,
        config: AttributeConfig,
        validation_data: Data = (),
        rankings: TrainingData = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        config = with_data_names(config, train_data=train_data, rankings=rankings, validation_data=validation_data)
        read = partial(read_ratings, skip_bad_rows=config.skip_bad_rows)
        parts, _, weights = encode_mixture(train_data, lambda data: [read(data)]) if train_data else ([], [], [])
        split = [split_ratings(part, 0.0 if validation_data else config.held_out_share, config.seed) for part in parts]
        held_out = read(validation_data) if validation_data else [item for _, later in split for item in later]
        heads = choose_heads(config.heads, [item for part in parts for item in part] + held_out, bool(rankings))
        super().__init__(config, "attributes", model, tokenizer)
        loaded, limits = self.loaded, config.limits
        encoded = [encode_ratings(now, heads, loaded, limits) for now, _ in split]
        mixed = MixedExamples([example for part in encoded for example in part], list(map(len, encoded)), weights)
        if rankings:
            encode = partial(encode_preferences, loaded=loaded, limits=limits, skip_bad_rows=config.skip_bad_rows)
            ranked = encode_mixture(rankings, encode)
            mixed = MixedExamples(
                [*mixed.examples, *ranked.examples], [*mixed.sizes, *ranked.sizes], [*mixed.weights, *ranked.weights]
            )
        if not mixed.examples or 0 in mixed.sizes:
            raise UserError("a source of the training data has nothing to learn from for these heads")
        validation = encode_ratings(held_out, heads, loaded, limits)
        listed = ", ".join(f"{head.name} ({head.kind})" for head in heads)
        self.run.say(f"attributes: {len(mixed.examples)} examples, {len(validation)} held out; heads {listed}")
        freeze_unused_lm_head(loaded.backbone)
        module = AttributeModel(loaded.backbone, heads, loaded.adapter)
        optimization = self.optimize_heads(module, mixed, validation)
        self.task = AttributeTask(self.run, config, loaded, optimization, mixed.examples, validation, heads)


def run_attribute_model(config: AttributeConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; returns the folder of the best model.

    Raises:
        UserError: for anything that the settings or the data have wrong.
    """
    if not config.train_data and not config.rankings:
        raise UserError("train_data is '', but must be given: attribute judgments to learn from")
    data = (config.validation_data, config.rankings)
    return AttributeTrainer(config.model, config.train_data, config, *data).train()


class AttributeTask:
    """Examples, losses and evaluation of an attribute model, as `align.training.loop.train` asks for them."""

    evaluate_before_training = False

    def __init__(
        self,
        run: Run,
        config: AttributeConfig,
        loaded: LoadedModel,
        optimization: Optimization,
        examples: list[EncodedTask],
        held_out: list[EncodedTask],
        heads: list[Head],
    ) -> None:
        self.run, self.config, self.loaded, self.optimization = run, config, loaded, optimization
        self.examples, self.held_out, self.heads = examples, held_out, heads
        self.lengths = group_sizes(loaded.backbone, examples)
        self.shape = flops_profile(loaded.backbone, loaded.adapter)
        self.folder = run.folder / "model"
        self.ranking = next((number for number, head in enumerate(heads) if head.kind == "ranking"), None)

    def _targets(self, examples: Sequence[EncodedTask]) -> Tensor:
        """[R, n] of all responses: NaN where a head was not judged."""
        return torch.tensor(
            [[item.attributes.get(head.name, math.nan) for head in self.heads] for item in examples for _ in item.responses]
        )

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        batch = [self.examples[row] for row in rows]
        # Each head's loss is a mean over what it was judged on in the global batch; heads count alike.
        counts = (~self._targets(batch).isnan()).sum(0).float()
        if self.ranking is not None:
            counts[self.ranking] = sum(bool(item.ranks) for item in batch)
        binary = torch.tensor([head.kind == "binary" for head in self.heads])

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            examples = [self.examples[row] for row in part]
            outputs = reward_rankings(self.optimization.module, examples, self.run.accelerator.device)
            device = outputs.device
            losses = head_losses(outputs, self._targets(examples).to(device), binary.to(device))
            if self.ranking is not None:
                ranks = [item.ranks or [1] * len(item.responses) for item in examples]
                pairs = Pairs(*(column.to(device) for column in pairs_of(ranks, [0.0] * len(ranks))))
                of_ranking = ranking_loss(outputs[:, self.ranking], pairs)
                losses = losses + of_ranking * torch.nn.functional.one_hot(
                    torch.tensor(self.ranking, device=device), len(self.heads)
                )
            means = losses / counts.to(device).clamp(min=1)
            flops = sum(group_flops(self.loaded.backbone, self.shape, item) for item in examples)
            return means.sum(), {
                **{f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)},
                "read": torch.full_like(means[0], sum(group_sizes(self.loaded.backbone, examples))),
                "flops": torch.tensor(flops, dtype=torch.float64, device=device),
            }

        return loss_of_rows

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        heads = {f"head/{head.name}": sums[f"head/{head.name}"] for head in self.heads}
        return {"loss": sums["loss"], **heads, "tokens/read": sums["read"]}

    @torch.no_grad()
    def _outputs(self, examples: Sequence[EncodedTask]) -> Tensor:
        """Outputs [R, n] of held-out responses, on every process."""

        def score_rows(rows: list[int]) -> list[list[float]]:
            part = [examples[row] for row in rows]
            outputs: list[list[float]] = reward_rankings(
                self.optimization.module, part, self.run.accelerator.device
            ).tolist()
            return outputs

        sizes = group_sizes(self.loaded.backbone, examples)
        return torch.tensor(map_rows(sizes, self.config.micro_batch_tokens, self.run.accelerator, score_rows))

    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        outputs, targets = self._outputs(self.held_out), self._targets(self.held_out)
        binary = torch.tensor([head.kind == "binary" for head in self.heads])
        losses, judged = head_losses(outputs, targets, binary), ~targets.isnan()
        counts, predicted = judged.sum(0), in_label_units(outputs, self.heads)
        metrics = {"validation/loss": float((losses / counts.clamp(min=1)).sum())}
        for number, head in enumerate(self.heads):
            if not counts[number]:
                continue
            ours, theirs = predicted[judged[:, number], number], targets[judged[:, number], number]
            metrics |= {f"validation/head/{head.name}/{name}": value for name, value in _figures(head, ours, theirs).items()}
        return metrics

    def save(self, metrics: dict[str, float]) -> None:
        state = self.optimization.model_state()
        if self.run.is_main:
            weights = weights_of(self.loaded.backbone, state, "backbone.model.")
            data = ", ".join(name for name in (self.config.train_data, self.config.rankings) if name)
            card = {"title": "Attribute model", "stage": "attributes", "data": data}
            card |= {name: f"{value:.4g}" for name, value in metrics.items()}
            linear = (state["linear.weight"], state["linear.bias"])
            save_attribute_model(self.folder, self.loaded, weights, linear, self.heads, card)
        self.run.accelerator.wait_for_everyone()

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


def _figures(head: Head, predicted: Tensor, judged: Tensor) -> dict[str, float]:
    """What is reported of one head on held-out responses; docs/rules.md defines each."""
    if head.kind == "binary":
        scored = [ScoredJudgment("", *pair) for pair in zip(predicted.tolist(), judged.tolist(), strict=True)]
        found = rule_metrics(scored)
        return {name: found[name] for name in ("auc", "balanced_accuracy", "calibration_error") if name in found}
    return {"error": float((predicted - judged).abs().mean()), "correlation": correlation(predicted.numpy(), judged.numpy())}
