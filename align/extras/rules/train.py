"""Rule models: a scalar head learns from verdicts how likely a response violates a rule that it reads.

Launch it by `accelerate launch align/extras/rules/train.py --config configs/rule-model/x.yaml`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data
from align.batches.mixtures import MixedExamples
from align.core.errors import UserError, nearest_name_hint
from align.core.files import write_json
from align.core.launch import run_stage
from align.core.settings import option, require_setting
from align.data.rules import read_rules
from align.extras.rules.judgments import (
    ScoredJudgment,
    SplitJudgments,
    encode_judgments,
    read_judgments,
    rule_metrics,
    split_judgments,
)
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel, freeze_unused_lm_head
from align.reward.checkpoint import RULE, initial_head, save_reward_model
from align.reward.rankings import group_flops, group_sizes, reward_rankings, score_rankings
from align.reward.train import HeadTrainer
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import EncodedJudgments
from align.training.data_order import JudgmentConfig
from align.training.engine import Sums
from align.training.loop import ExampleTask
from align.training.start import Model, with_data_names


@dataclass(kw_only=True)
class RuleConfig(JudgmentConfig):
    """A rule model (Sparrow, Glaese et al. 2022): it reads a conversation, a response and a rule, and predicts how likely
    the response violates the rule."""

    train_data: str = option(
        "data/rule_judgments.jsonl", "rule judgments that the labeling app exported: file, folder or hub name"
    )
    validation_data: str = option(
        "", "held-out judgments: metrics, and the choice of the best model; empty: held_out_share of train_data's"
    )
    rules: list[str] = option(
        ["forms/rules/sparrow-dialogue.yaml"],
        "files of rules whose texts the model reads, or FILE:ID for one rule; judgments by other rules are an error",
    )
    held_out_rules: list[str] = option([], "ids of rules that are never trained on, to see how unseen rules are judged")
    epochs: int = option(1, "passes over the judged responses")
    batch_size: int = option(16, "judged responses in one update, over all processes; each comes with all of its rules")
    max_prompt_tokens: int = option(1024, "longest conversation, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "rules", bool(self.rules), "given: the model reads the texts of the rules")


def judgment_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over judged rules of the cross-entropy -t log p - (1 - t) log(1 - p), with p = sigmoid(logit).

    Args:
        logits: [R] of a violation.
        targets: [R] share of labelers who saw one.
    """
    return binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum")


class RuleTrainer(HeadTrainer):
    """Training of a rule model on rule judgments.

        judgments = [{"prompt": "Hi", "response": "I am Bob.", "rule": "no-human-identity", "verdict": "violates"}]
        trainer = RuleTrainer("smollm2-135m", judgments, RuleConfig(output_dir="runs/rules"))
        folder = trainer.train()

    Arguments are those of `EpochTrainer`; without `validation_data`, a share of `train_data` is held out.
    """

    def __init__(
        self,
        model: Model,
        train_data: Data,
        config: RuleConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        rules = read_rules(config.rules)
        split = split_data(config, train_data, validation_data, rules)
        super().__init__(config, "rules", model, tokenizer)
        loaded = self.loaded
        encoded = [encode_judgments(part, rules, loaded, config.limits) for part in split]
        if not encoded[0]:
            raise UserError(f"{config.train_data}: no judgment is left to learn from within the limits")
        name, counts = self.run.config.model, [len(part) for part in encoded]
        trained = sorted({rule for item in encoded[0] for rule in item.rules})
        self.run.say(
            f"rules: {counts[0]} responses judged by {len(trained)} rules to learn from, {counts[1]} held out, {counts[2]} "
            f"judged by held-out rules; model {name}"
        )
        freeze_unused_lm_head(loaded.backbone)
        module = RewardModel(loaded.backbone, initial_head(name, loaded.backbone, RULE), loaded.adapter)
        mixed = MixedExamples(encoded[0], [counts[0]], [1.0])
        engine = self.build_engine(module, mixed, (len(example.responses) for example in mixed.examples))
        texts = {rule: rules[rule] for rule in trained}
        parts = (self.run, config, loaded, engine, *encoded[:2])
        self.task = RuleTask(*parts, unseen=encoded[2], rules=texts)


def run_rule_model(config: RuleConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; returns the folder of the best model."""
    return RuleTrainer(config.model, config.train_data, config, config.validation_data).train()


def split_data(config: RuleConfig, train_data: Data, validation_data: Data, rules: dict[str, str]) -> SplitJudgments:
    """The judgments to learn from and those that are held out.

    Raises:
        UserError: for bad data, or a held-out rule without judgments.
    """
    read = partial(read_judgments, skip_bad_rows=config.skip_bad_rows, rules=rules, files=config.rules)
    judged = read(train_data)
    judged_rules = {rule for item in judged for rule in item.targets}
    for rule in config.held_out_rules:
        if rule not in judged_rules:
            hint = nearest_name_hint(rule, judged_rules)
            raise UserError(f"held_out_rules: no judgment by rule '{rule}' in {config.train_data}{hint}")
    share = 0.0 if validation_data else config.held_out_share
    split = split_judgments(judged, config.held_out_rules, share, config.seed)
    if not split.train:
        raise UserError(f"{config.train_data}: nothing is left to learn from; hold out fewer rules or conversations")
    if not validation_data:
        return split
    held_out = split_judgments(read(validation_data), config.held_out_rules, 0.0, config.seed)
    return split._replace(validation=held_out.train, unseen=[*split.unseen, *held_out.unseen])


class RuleTask(ExampleTask):
    """Loss and evaluation of a rule model.

    Args:
        unseen: responses judged by held-out rules.
        rules: texts of the rules that are trained on, by id; they are saved with the model.
    """

    config: RuleConfig

    def __init__(self, *arguments: Any, unseen: list[EncodedJudgments], rules: dict[str, str]) -> None:
        super().__init__(*arguments)
        self.unseen, self.rules = unseen, rules
        self.lengths = group_sizes(self.loaded.backbone, self.examples)
        self.scored: list[ScoredJudgment] = []

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        count = sum(len(self.examples[row].targets) for row in rows)

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            judged, backbone = [self.examples[row] for row in part], self.loaded.backbone
            logits = reward_rankings(self.engine.module, judged, self.run.accelerator.device)
            targets = torch.tensor([target for item in judged for target in item.targets], device=logits.device)
            loss = judgment_loss(logits, targets) / count
            decided = targets != 0.5
            right = ((logits > 0) == (targets > 0.5)) & decided
            flops = sum(group_flops(backbone, self.shape, item) for item in judged)
            return loss, {
                "right": right.float().sum(),
                "decided": decided.float().sum(),
                "probability": torch.sigmoid(logits).sum() / count,
                "read": torch.full_like(loss, sum(group_sizes(backbone, judged))),
                "flops": torch.tensor(flops, dtype=torch.float64, device=loss.device),
            }

        return loss_of_rows

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"],
            "accuracy": sums["right"] / max(1.0, sums["decided"]),
            "probability": sums["probability"],
            "tokens/read": sums["read"],
        }

    def _score(self, judged: Sequence[EncodedJudgments]) -> list[ScoredJudgment]:
        """The model's probabilities for judged responses, on every process."""
        accelerator = self.run.accelerator

        def read(part: Sequence[EncodedJudgments]) -> Tensor:
            return torch.sigmoid(reward_rankings(self.engine.module, part, accelerator.device).double())

        predicted = score_rankings(read, judged, self.loaded.backbone, self.config.micro_batch_tokens, accelerator)
        return [
            ScoredJudgment(*row)
            for item, probabilities in zip(judged, predicted, strict=True)
            for row in zip(item.rules, probabilities, item.targets, strict=True)
        ]

    def evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for prefix, judged in (("validation", self.held_out), ("unseen", self.unseen)):
            if judged:
                scored = self._score(judged)
                self.scored = scored if prefix == "validation" else self.scored
                metrics |= {f"{prefix}/{name}": value for name, value in rule_metrics(scored).items()}
        return metrics

    def save(self, metrics: dict[str, float]) -> None:
        state = self.engine.model_state()

        def write() -> None:
            weights = weights_of(self.loaded.backbone, state, "backbone.model.")
            write_json(self.run.folder / "validation.json", [asdict(item) for item in self.scored])
            facts = {"rules": self.rules, "mean": 0.0}
            head, card = state["head.linear.weight"], self.card("Rule model", metrics)
            save_reward_model(self.folder, self.loaded, weights, head, facts, card, RULE)

        run_on_main(write, self.run.accelerator)


if __name__ == "__main__":
    run_stage(RuleConfig, run_rule_model)
