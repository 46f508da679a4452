"""Rule models: a scalar head learns from verdicts how likely a response violates a rule that it reads.

Launch it by `accelerate launch align/extras/rules/train.py --config configs/rule-model/x.yaml`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

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
from align.data.rules import read_rules
from align.extras.rules.config import RuleConfig
from align.extras.rules.judgments import (
    ScoredJudgment,
    SplitJudgments,
    encode_judgments,
    read_judgments,
    rule_metrics,
    split_judgments,
)
from align.models.backbone import Backbone, flops_profile
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel, freeze_unused_lm_head
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER
from align.reward.checkpoint import RULE, initial_head, require_savable_classifier, save_reward_model
from align.reward.rankings import group_flops, group_sizes, reward_rankings, score_rankings
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import EncodedJudgments
from align.training.data_order import DataOrder
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.start import Model, build_engine, open_run, warn_if_prompts_are_reread, with_data_names


def train(
    config: RuleConfig,
    loaded: LoadedModel,
    engine: TrainEngine,
    order: DataOrder[EncodedJudgments],
    held_out: list[EncodedJudgments],
    unseen: list[EncodedJudgments],
    rules: dict[str, str],
) -> Path:
    """Train a rule model from the last checkpoint on; return the folder of the best model.

    Args:
        engine: of a `RewardModel`.
        held_out: responses that choose the best model; may be empty.
        unseen: responses judged by held-out rules.
        rules: texts of the rules that are trained on, by id; they are saved with the model.
    """
    run, budget, backbone = engine.run, config.micro_batch_tokens, loaded.backbone
    profile = flops_profile(backbone, loaded.adapter)
    loss_of = partial(batch_loss, engine.module, device=run.accelerator.device)
    loop = EpochLoop(engine, order, config.eval_steps)
    planned = ((batch, group_sizes(backbone, batch)) for batch in order.first_batches())
    loop.try_largest_micro_batch(planned, loss_of)

    for update in loop.updates():
        batch = order.batch(update)
        sizes = group_sizes(backbone, batch)
        plan = micro_batches(range(len(batch)), sizes, budget, run.accelerator)
        with loop.learning(update, batch, loaded.tokenization):
            for rows in engine.micro_batches(plan):
                loss, sums = loss_of([batch[row] for row in rows], batch)
                engine.backward(loss, sums)
            step = engine.step(update)
        metrics = dict(engine.sums)
        metrics["accuracy"] = metrics.pop("right") / max(1.0, metrics.pop("decided"))
        flops = sum(group_flops(backbone, profile, item) for item in batch)
        metrics |= step | loop.costs(sum(sizes), flops)
        if loop.evaluates(update):
            found, scored = evaluate(engine, backbone, held_out, unseen, budget)
            metrics |= found
            if loop.is_best(metrics):
                save(loaded, engine, config.train_data, metrics, scored, rules)
        loop.log(update, metrics)

    if loop.needs_evaluation():
        metrics, scored = evaluate(engine, backbone, held_out, unseen, budget)
        if loop.is_best(metrics):
            save(loaded, engine, config.train_data, metrics, scored, rules)
    run.close()
    return run.folder / "model"


def batch_loss(
    model: nn.Module,
    examples: Sequence[EncodedJudgments],
    batch: Sequence[EncodedJudgments],
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the loss, and of its metrics.

    Args:
        model: a `RewardModel`, or the engine around it.
        examples: of the micro-batch.
        batch: the global batch, whose judgments the loss is a mean over.
    """
    count = sum(len(item.targets) for item in batch)
    logits = reward_rankings(model, examples, device)
    targets = torch.tensor([target for item in examples for target in item.targets], device=device)
    decided = targets != 0.5
    return judgment_loss(logits, targets) / count, {
        "right": (((logits > 0) == (targets > 0.5)) & decided).float().sum(),
        "decided": decided.float().sum(),
        "probability": torch.sigmoid(logits).sum() / count,
    }


def judgment_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over judged rules of the cross-entropy -t log p - (1 - t) log(1 - p), with p = sigmoid(logit).

    Args:
        logits: [R] of a violation.
        targets: [R] share of labelers who saw one.
    """
    return binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum")


def evaluate(
    engine: TrainEngine,
    backbone: Backbone,
    held_out: list[EncodedJudgments],
    unseen: list[EncodedJudgments],
    budget: int,
) -> tuple[dict[str, float], list[ScoredJudgment]]:
    """Return metrics on held-out conversations and held-out rules, and the scored judgments of the former."""
    scored = score_judgments(engine, backbone, held_out, budget) if held_out else []
    by_rule = {"validation": scored, "held_out_rules": score_judgments(engine, backbone, unseen, budget) if unseen else []}
    return {
        f"{prefix}/{name}": value
        for prefix, found in by_rule.items()
        if found
        for name, value in rule_metrics(found).items()
    }, scored


def score_judgments(
    engine: TrainEngine, backbone: Backbone, judged: Sequence[EncodedJudgments], budget: int
) -> list[ScoredJudgment]:
    """Return the model's probabilities for judged responses, on every process."""

    def read(part: Sequence[EncodedJudgments]) -> Tensor:
        return torch.sigmoid(reward_rankings(engine.module, part, engine.accelerator.device).double())

    predicted = score_rankings(read, judged, backbone, budget, engine.accelerator)
    return [
        ScoredJudgment(*row)
        for item, probabilities in zip(judged, predicted, strict=True)
        for row in zip(item.rules, probabilities, item.targets, strict=True)
    ]


def save(
    loaded: LoadedModel,
    engine: TrainEngine,
    data: str,
    metrics: dict[str, float],
    scored: list[ScoredJudgment],
    rules: dict[str, str],
) -> None:
    """Save the model as the run's result."""
    run, state = engine.run, engine.model_state()

    def write() -> None:
        weights = weights_of(loaded.backbone, state, "backbone.model.")
        write_json(run.folder / "validation.json", [asdict(item) for item in scored])
        metadata, card = {"rules": rules, "mean": 0.0}, run.card("Rule model", data, metrics)
        save_reward_model(run.folder / "model", loaded, weights, state["head.linear.weight"], metadata, card, RULE)

    run_on_main(write, run.accelerator)


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
    share = 0.0 if is_given(validation_data) else config.validation_split
    split = split_judgments(judged, config.held_out_rules, share, config.seed)
    if not split.train:
        raise UserError(f"{config.train_data}: nothing is left to learn from; hold out fewer rules or conversations")
    if not is_given(validation_data):
        return split
    held_out = split_judgments(read(validation_data), config.held_out_rules, 0.0, config.seed)
    return split._replace(validation=held_out.train, unseen=[*split.unseen, *held_out.unseen])


class RuleTrainer:
    """Training of a rule model on rule judgments.

        judgments = [{"prompt": "Hi", "response": "I am Bob.", "rule": "no-human-identity", "verdict": "violates"}]
        trainer = RuleTrainer("smollm2-135m", judgments, RuleConfig(output_dir="runs/rules"))
        folder = trainer.train()

    Arguments are those of `SFTTrainer`; without `validation_data`, a share of `train_data` is held out.
    """

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
        split = split_data(config, train_data, validation_data, rules)
        self.run, self.loaded = run, loaded = open_run(config, "rules", model, tokenizer, REWARD_ADAPTER, True)
        run_on_main(lambda: require_savable_classifier(loaded), run.accelerator)
        learned, self.held_out, self.unseen = [encode_judgments(part, rules, loaded, config.limits) for part in split]
        if not learned:
            raise UserError(f"{config.train_data}: no judgment is left to learn from within the limits")
        trained = sorted({rule for item in learned for rule in item.rules})
        self.rules = {rule: rules[rule] for rule in trained}
        run.print(
            f"rules: {counted(len(learned), 'response')} judged by {counted(len(trained), 'rule')} to learn from, "
            f"{len(self.held_out)} held out, {len(self.unseen)} judged by held-out rules; model {run.config.model}"
        )
        freeze_unused_lm_head(loaded.backbone)
        head = initial_head(run.config.model, loaded.backbone, RULE)
        module = RewardModel(loaded.backbone, head, loaded.adapter)
        warn_if_prompts_are_reread(run, loaded.backbone, (len(example.responses) for example in learned))
        self.order = DataOrder(MixedExamples(learned, [len(learned)], [1.0]), config.seed, config.batch_size)
        run.print(run.memory.check(run.config, module))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def train(self) -> Path:
        """Train from the last checkpoint on; return the folder of the best model."""
        if self.config.dry_run:
            return EpochLoop(self.engine, self.order, self.config.eval_steps).end_dry_run()
        parts = (self.loaded, self.engine, self.order, self.held_out, self.unseen, self.rules)
        return train(self.config, *parts)


def run_rule_model(config: RuleConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; return the folder of the best model."""
    return RuleTrainer(config.model, config.train_data, config, config.validation_data).train()


def main() -> None:
    """Train a rule model with settings from the command line."""
    run_stage(RuleConfig, run_rule_model)


if __name__ == "__main__":
    main()
