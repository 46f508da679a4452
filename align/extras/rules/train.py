"""Training of rule models: a scalar head predicts violations from response and rule text.

Launch it with `accelerate launch align/extras/rules/train.py --config configs/rule-model/x.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import MixedExamples, is_given
from align.core.errors import UserError, counted, nearest_name_hint
from align.core.files import write_json
from align.core.launch import run_stage
from align.core.settings import ModelConfig, OptimizationConfig, RunConfig, Settings, option, require_setting
from align.core.tensor_ops import BatchLoss
from align.extras.rules.judgments import (
    ScoredJudgment,
    SplitJudgments,
    encode_judgments,
    read_judgments,
    read_rules,
    rule_metrics,
    split_judgments,
)
from align.models.backbone import flops_profile
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel
from align.models.loading import LoadedModel, freeze_unused_lm_head
from align.models.roles import REWARD_ADAPTER
from align.reward.checkpoint import RULE, initial_head, require_savable_classifier, save_reward_model
from align.reward.rankings import group_flops, group_sizes, reward_rankings, score_rankings
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import EncodedJudgments
from align.training.data_order import DataOrder, EpochConfig, measured_on
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.model_source import Model, ModelSource
from align.training.monitor import Monitor, examples_as_text
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, warn_if_prompts_are_reread, with_data_names


@dataclass(kw_only=True)
class JudgmentConfig(Settings):
    """Settings of stages that train on judgments of single responses."""

    validation_split: float = option(
        0.1,
        "Fraction of conversations to hold out, with all their judgments. Ignored with validation_data.",
        ge=0,
        lt=1,
    )


@dataclass(kw_only=True)
class RuleConfig(JudgmentConfig, EpochConfig, ModelConfig, RunConfig, OptimizationConfig):
    """Rule model (Sparrow, Glaese et al. 2022). Predicts the probability that a response violates a rule, given the
    conversation.
    """

    train_data: str = option(
        "data/rule_judgments.jsonl", "Training rule judgments, as exported by the labeling app: file, folder or Hub id."
    )
    validation_data: str = option(
        "", "Held-out judgments, used for metrics and to select the best model. Default: validation_split of train_data."
    )
    rules: list[str] = option(
        ["forms/rules/sparrow-dialogue.yaml"],
        "Rule files, or FILE:ID for a single rule. Judgments by other rules raise an error.",
    )
    held_out_rules: list[str] = option([], "Ids of rules to exclude from training, to measure generalization to new rules.")
    num_train_epochs: int = option(1, "Number of training epochs.")
    batch_size: int = option(16, "Judged responses per update, over all processes. Each comes with all its rules.")
    max_prompt_tokens: int = option(1024, "Maximum conversation length, in tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "rules", bool(self.rules), "set to rule files")


def train(form: Any, engine: TrainEngine, order: DataOrder[Any], held_out: list[Any], data: str, eval_steps: int) -> Path:
    """Train a model of this package's extras from the last checkpoint. Return the folder of the best model.

    Args:
        form: a `RuleForm`, `HeadForm`, `GenerativeForm` or `DistillForm`, whose module is in the engine.
        held_out: examples for selecting the best model; may be empty.
        data: name of the training data, for the model card.
        eval_steps: number of updates between evaluations. 0 evaluates at the end of each epoch.
    """
    run, budget = engine.run, engine.run.optimization.micro_batch_tokens
    loop = EpochLoop(engine, order, eval_steps, measured_on("validation_data", held_out, **form.measure))
    if run.config.dry_run:
        return loop.end_dry_run()
    monitor, loss_of = Monitor(run), partial(form.batch_loss, engine.module, run.accelerator.device)
    loop.measure_largest_micro_batch(((batch, form.sizes(batch)) for batch in order.first_batches()), loss_of)
    if form.evaluates_start and not loop.done:
        run.log(0, form.evaluate(engine, held_out, budget))

    for update in loop.updates():
        batch = order.batch(update)
        sizes = form.sizes(batch)
        with monitor.update(update, partial(examples_as_text, batch, form.loaded.tokenization)):
            for part in micro_batches(range(len(batch)), sizes, budget, run.accelerator):
                engine.backward(loss_of([batch[row] for row in part.rows], batch), part.weight)
            sums = engine.reduce_gradients()
            monitor.lap("learn")
            monitor.add(form.training_metrics(sums) | engine.step(update))
            monitor.lap("step")
        monitor.add({"tokens/read": float(sum(sizes))})
        monitor.add_speed(sum(sizes), sum(map(form.flops, batch)))
        if loop.is_due(update):
            monitor.add(evaluate_and_save(form, loop, held_out, data, monitor.row))
            monitor.lap("validate")
        monitor.log(update, loop.progress(monitor.row["loss"]))

    if loop.is_due_again():
        evaluate_and_save(form, loop, held_out, data, {})
    return run.folder / "model"


def evaluate_and_save(
    form: Any, loop: EpochLoop, held_out: list[Any], data: str, metrics: dict[str, float]
) -> dict[str, float]:
    """Evaluate the model and save it if it is the best; return the update's `metrics` with the evaluation's."""
    metrics = metrics | form.evaluate(loop.engine, held_out, loop.run.optimization.micro_batch_tokens)
    if is_best := loop.is_best(metrics):
        form.save(loop.engine, data, metrics)
    loop.record_evaluation(metrics, is_best)
    return metrics


class RuleForm:
    """Rule model objective: a violation probability for each judged rule.

    `unseen` are responses judged by held-out rules. The text of the training rules in `rules` is saved.
    """

    evaluates_start = False
    measure: Mapping[str, Any] = MappingProxyType({})
    """Settings that affect the validation loss."""

    def __init__(self, loaded: LoadedModel, unseen: list[EncodedJudgments], rules: dict[str, str]) -> None:
        self.loaded, self.profile = loaded, flops_profile(loaded.backbone, loaded.adapter)
        self.unseen, self.rules = unseen, rules
        self.scored: list[ScoredJudgment] = []

    def sizes(self, examples: Sequence[EncodedJudgments]) -> list[int]:
        """Return the number of tokens in memory per example."""
        return group_sizes(self.loaded.backbone, examples)

    def flops(self, example: EncodedJudgments) -> float:
        """Return the training FLOPs of an example."""
        return group_flops(self.loaded.backbone, self.profile, example)

    def batch_loss(
        self, model: nn.Module, device: torch.device, examples: list[EncodedJudgments], batch: list[EncodedJudgments]
    ) -> BatchLoss:
        """Return a micro-batch's contribution to the loss and the metrics of its global batch."""
        count = sum(len(item.targets) for item in batch)
        logits = reward_rankings(model, examples, device)
        targets = torch.tensor([target for item in examples for target in item.targets], device=device)
        decided = targets != 0.5
        sums = {
            "right": (((logits > 0) == (targets > 0.5)) & decided).float().sum(),
            "decided": decided.float().sum(),
            "probability": torch.sigmoid(logits).sum() / count,
        }
        return BatchLoss(judgment_loss(logits, targets) / count, sums)

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update, with the accuracy on decided judgments."""
        metrics = dict(sums)
        return metrics | {"accuracy": metrics.pop("right") / max(1.0, metrics.pop("decided"))}

    def evaluate(self, engine: TrainEngine, held_out: list[EncodedJudgments], budget: int) -> dict[str, float]:
        """Return metrics on held-out conversations and on held-out rules, equal on every process."""
        self.scored = self._score(engine, held_out, budget)
        parts = {"validation": self.scored, "held_out_rules": self._score(engine, self.unseen, budget)}
        return {
            f"{part}/{name}": value for part, found in parts.items() if found for name, value in rule_metrics(found).items()
        }

    def _score(self, engine: TrainEngine, judged: list[EncodedJudgments], budget: int) -> list[ScoredJudgment]:
        if not judged:
            return []

        def read(part: Sequence[EncodedJudgments]) -> Tensor:
            return torch.sigmoid(reward_rankings(engine.module, part, engine.accelerator.device).double())

        predicted = score_rankings(read, judged, self.loaded.backbone, budget, engine.accelerator)
        return [
            ScoredJudgment(*row)
            for item, probabilities in zip(judged, predicted, strict=True)
            for row in zip(item.rules, probabilities, item.targets, strict=True)
        ]

    def save(self, engine: TrainEngine, data: str, metrics: dict[str, float]) -> None:
        """Save the model as the run's result."""
        run, state, loaded = engine.run, engine.model_state(), self.loaded

        def write() -> None:
            weights = weights_of(loaded.backbone, state)
            write_json(run.folder / "validation.json", [item._asdict() for item in self.scored])
            metadata, card = {"rules": self.rules, "mean": 0.0}, run.card("Rule model", data, metrics)
            save_reward_model(run.folder / "model", loaded, weights, state["head.linear.weight"], metadata, card, RULE)

        run_on_main(write, run.accelerator)


def judgment_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy -t log p - (1 - t) log(1 - p), with p = sigmoid(logit), over judged rules [R].

    A target is the fraction of labelers who saw a violation.
    """
    return binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum")


class RuleTrainer:
    """Trainer of rule models.

        judgments = [{"prompt": "Hi", "response": "I am Bob.", "rule": "no-human-identity", "verdict": "violates"}]
        trainer = RuleTrainer("smollm2-135m", judgments, RuleConfig(output_dir="runs/rules"))
        folder = trainer.train()

    For arguments, see `SFTTrainer`. Without `validation_data`, a fraction of `train_data` is held out.
    """

    @making_trainer()
    def __init__(
        self,
        model: Model,
        train_data: Data,
        config: RuleConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        rules = read_rules(config.rules)
        split = self._split(train_data, validation_data, rules)
        source = ModelSource(model, tokenizer)
        run = Run(source.settings(config), "rules")
        loaded = source.load(run, REWARD_ADAPTER, allow_reward_model=True)
        run_on_main(lambda: require_savable_classifier(loaded), run.accelerator)
        learned, self.held_out, unseen = [encode_judgments(part, rules, loaded, config.limits) for part in split]
        if not learned:
            raise UserError(f"{config.train_data}: all judgments exceed the limits")
        trained = sorted({rule for item in learned for rule in item.rules})
        run.print(
            f"rules: {counted(len(learned), 'training response')} judged by {counted(len(trained), 'rule')}, "
            f"{len(self.held_out)} held out, {len(unseen)} judged by held-out rules; model {run.model_config.model}"
        )
        freeze_unused_lm_head(loaded.backbone)
        module = RewardModel(loaded.backbone, initial_head(run.model_config.model, loaded.backbone, RULE), loaded.adapter)
        warn_if_prompts_are_reread(run, loaded.backbone, (len(example.responses) for example in learned))
        self.form = RuleForm(loaded, unseen, {rule: rules[rule] for rule in trained})
        self.order = DataOrder(MixedExamples(learned, [len(learned)], [1.0]), config.seed, config.batch_size)
        run.print(run.memory.check(module))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def _split(self, train_data: Data, validation_data: Data, rules: dict[str, str]) -> SplitJudgments:
        """Split the judgments by purpose. Raise a UserError if data are invalid or a held-out rule has no judgments."""
        config = self.config
        read = partial(read_judgments, skip_bad_rows=config.skip_bad_rows, rules=rules, files=config.rules)
        judged = read(train_data)
        judged_rules = {rule for item in judged for rule in item.targets}
        for rule in config.held_out_rules:
            if rule not in judged_rules:
                hint = nearest_name_hint(rule, judged_rules)
                raise UserError(f"held_out_rules: no judgments by rule '{rule}' in {config.train_data}{hint}")
        share = 0.0 if is_given(validation_data) else config.validation_split
        split = split_judgments(judged, config.held_out_rules, share, config.seed)
        if not split.train:
            raise UserError(f"{config.train_data}: no training data left; hold out fewer rules or conversations")
        if not is_given(validation_data):
            return split
        held_out = split_judgments(read(validation_data), config.held_out_rules, 0.0, config.seed)
        return split._replace(validation=held_out.train, unseen=[*split.unseen, *held_out.unseen])

    def train(self) -> Path:
        """Train from the last checkpoint. Return the folder of the best model."""
        config = self.config
        with self.engine.run:
            return train(self.form, self.engine, self.order, self.held_out, config.train_data, config.eval_steps)


def run_rule_model(config: RuleConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; return the folder of the best model."""
    return RuleTrainer(config.model, config.train_data, config, config.validation_data).train()


if __name__ == "__main__":
    run_stage(RuleConfig, run_rule_model)
