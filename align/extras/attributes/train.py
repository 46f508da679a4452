"""Attribute models: examples of all tasks are mixed and shuffled, and each task has its loss (MT-DNN).

Launch it by `accelerate launch align/extras/attributes/train.py --config configs/attributes/x.yaml`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import MixedExamples, Mixture, TrainingData, encode_mixture, is_given, mixture_of
from align.core.errors import UserError, counted
from align.core.launch import run_stage
from align.core.statistics import correlation
from align.extras.attributes.config import AttributeConfig
from align.extras.attributes.generative import GenerativeForm
from align.extras.attributes.heads import HeadForm, targets_of
from align.extras.attributes.judgments import choose_heads, encode_preferences, read_ratings
from align.extras.attributes.model import Head
from align.extras.rules.judgments import ScoredJudgment, rule_metrics, split_judgments
from align.models.checkpoint import weights_of
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER
from align.runtime.distributed import run_on_main
from align.training.data_order import DataOrder
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.start import Model, build_engine, open_run, with_data_names

Form = HeadForm | GenerativeForm


def train(
    config: AttributeConfig,
    loaded: LoadedModel,
    form: Any,
    engine: TrainEngine,
    order: DataOrder[Any],
    held_out: list[Any],
) -> Path:
    """Train an attribute model from the last checkpoint on; return the folder of the best model.

    Args:
        form: a `HeadForm` or a `GenerativeForm`.
        engine: of the form's module.
        held_out: rated responses that choose the best model; may be empty.
    """
    run, budget = engine.run, config.micro_batch_tokens
    loss_of = partial(form.batch_loss, engine.module, run.accelerator.device)
    loop = EpochLoop(engine, order, config.eval_steps)
    loop.try_largest_micro_batch(((batch, form.sizes(batch)) for batch in order.first_batches()), loss_of)

    for update in loop.updates():
        batch = order.batch(update)
        sizes = form.sizes(batch)
        plan = micro_batches(range(len(batch)), sizes, budget, run.accelerator)
        with loop.learning(update, batch, loaded.tokenization):
            for rows in engine.micro_batches(plan):
                loss, sums = loss_of([batch[row] for row in rows], batch)
                engine.backward(loss, sums)
            step = engine.step(update)
        metrics = engine.sums | step | loop.costs(sum(sizes), sum(map(form.flops, batch)))
        if loop.evaluates(update):
            metrics |= evaluate(form, engine, held_out, budget)
            if loop.is_best(metrics):
                save(config, loaded, form, engine, metrics)
        loop.log(update, metrics)

    if loop.needs_evaluation():
        metrics = evaluate(form, engine, held_out, budget)
        if loop.is_best(metrics):
            save(config, loaded, form, engine, metrics)
    run.close()
    return run.folder / "model"


@torch.no_grad()
def evaluate(form: Form, engine: TrainEngine, held_out: list[Any], budget: int) -> dict[str, float]:
    """Return metrics on held-out responses, equal on every process."""
    if not held_out:
        return {}
    predicted, losses, extra_losses = form.judge(engine, held_out, budget)
    targets = targets_of(held_out, form.heads)
    judged = ~targets.isnan()
    counts = judged.sum(0)
    metrics = {"validation/loss": float((losses / counts.clamp(min=1)).sum()) + sum(extra_losses.values())}
    metrics |= {f"validation/{name}": value for name, value in extra_losses.items()}
    for number, head in enumerate(form.heads):
        if not counts[number]:
            continue
        rows = judged[:, number]
        found = head_metrics(head, predicted[rows, number], targets[rows, number])
        metrics |= {f"validation/head/{head.name}/{name}": value for name, value in found.items()}
    return metrics


def head_metrics(head: Head, predicted: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the metrics of one head on held-out responses; docs/rules.md defines each."""
    if head.kind == "binary":
        scored = [ScoredJudgment("", *pair) for pair in zip(predicted.tolist(), targets.tolist(), strict=True)]
        found = rule_metrics(scored)
        return {name: found[name] for name in ("auc", "balanced_accuracy", "calibration_error") if name in found}
    return {
        "error": float((predicted - targets).abs().mean()),
        "correlation": correlation(predicted.numpy(), targets.numpy()),
    }


def save(config: AttributeConfig, loaded: LoadedModel, form: Form, engine: TrainEngine, metrics: dict[str, float]) -> None:
    """Save the model as the run's result."""
    run, state = engine.run, engine.model_state()

    def write() -> None:
        data = ", ".join(name for name in (config.train_data, config.rankings) if name)
        weights = weights_of(loaded.backbone, state, "backbone.model.")
        form.save(run.folder / "model", weights, state, run.card("Attribute model", data, metrics))

    run_on_main(write, run.accelerator)


class AttributeTrainer:
    """Training of a model that predicts several attributes of a response.

        rows = [{"prompt": "Hi", "response": "Hello!", "attributes": {"sensible": 1, "unsafe": 0, "rating": 6}}]
        folder = AttributeTrainer("smollm2-135m", rows, AttributeConfig(output_dir="runs/attributes")).train()

    Arguments are those of `SFTTrainer`;
    without `validation_data`, a share of `train_data` is held out; `rankings` train a head called `preference`.
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
        judgments = mixture_of(train_data, config.task_prefixes) if is_given(train_data) else Mixture([], [])
        parts = [read(source) for source in judgments.sources]
        has_validation = is_given(validation_data)
        share = 0.0 if has_validation else config.validation_split
        split = [split_judgments(part, (), share, config.seed) for part in parts]
        held_out = read(validation_data) if has_validation else [item for part in split for item in part.validation]
        heads = choose_heads(config.heads, [item for part in parts for item in part] + held_out, is_given(rankings))
        generative = config.form == "generative"
        adapter = "policy" if generative else REWARD_ADAPTER
        run, loaded = open_run(config, "attributes", model, tokenizer, adapter, allow_reward_model=not generative)
        form = GenerativeForm(loaded, heads, config.generator_filter) if generative else HeadForm(loaded, heads)
        module = form.build_module()
        encoded = [form.encode(part.train, config.limits) for part in split]
        examples: list[Any] = [example for part in encoded for example in part]
        sizes, weights = list(map(len, encoded)), list(judgments.weights)
        if is_given(rankings):
            limits, skip = config.limits, config.skip_bad_rows
            encode = partial(encode_preferences, loaded=loaded, limits=limits, skip_bad_rows=skip)
            ranked = encode_mixture(rankings, encode)
            examples, sizes, weights = examples + ranked.examples, sizes + ranked.sizes, weights + ranked.weights
        if not examples or 0 in sizes:
            raise UserError("a source of the training data has nothing to learn from for these heads")
        self.config, self.run, self.loaded, self.form = config, run, loaded, form
        self.held_out: list[Any] = list(form.encode(held_out, config.limits))
        listed = ", ".join(f"{head.name} ({head.kind})" for head in heads)
        run.print(f"attributes: {counted(len(examples), 'example')}, {len(self.held_out)} held out; {config.form}: {listed}")
        mixed = MixedExamples(examples, sizes, weights)
        self.order: DataOrder[Any] = DataOrder(mixed, config.seed, config.batch_size, config)
        run.print(run.memory.check(run.config, module))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def train(self) -> Path:
        """Train from the last checkpoint on; return the folder of the best model."""
        if self.config.dry_run:
            return EpochLoop(self.engine, self.order, self.config.eval_steps).end_dry_run()
        return train(self.config, self.loaded, self.form, self.engine, self.order, self.held_out)


def run_attribute_model(config: AttributeConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; return the folder of the best model."""
    if not config.train_data and not config.rankings:
        raise UserError("train_data is '', but must be given: attribute judgments to learn from")
    data = (config.validation_data, config.rankings)
    return AttributeTrainer(config.model, config.train_data, config, *data).train()


def main() -> None:
    """Train an attribute model with settings from the command line."""
    run_stage(AttributeConfig, run_attribute_model)


if __name__ == "__main__":
    main()
