"""Attribute models: examples of all tasks are mixed and shuffled, and each task has its loss (MT-DNN).

Launch it by `accelerate launch align/extras/attributes/train.py --config configs/attributes/x.yaml`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data
from align.batches.mixtures import MixedExamples, Mixture, TrainingData, encode_mixture, mixture_of
from align.core.errors import UserError
from align.core.launch import run_stage
from align.extras.attributes.generative import GenerativeTask
from align.extras.attributes.judgments import choose_heads, encode_preferences, read_ratings
from align.extras.attributes.tasks import AttributeConfig, HeadTask
from align.extras.rules.judgments import split_judgments
from align.training.loop import EpochTrainer
from align.training.start import Model, with_data_names


class AttributeTrainer(EpochTrainer):
    """Training of a model that predicts several attributes of a response.

        rows = [{"prompt": "Hi", "response": "Hello!", "attributes": {"sensible": 1, "unsafe": 0, "rating": 6}}]
        folder = AttributeTrainer("smollm2-135m", rows, AttributeConfig(output_dir="runs/attributes")).train()

    Arguments are those of `EpochTrainer`;
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
        judgments = mixture_of(train_data, config.task_prefixes) if train_data else Mixture([], [])
        parts = [read(source) for source in judgments.sources]
        share = 0.0 if validation_data else config.held_out_share
        split = [split_judgments(part, (), share, config.seed) for part in parts]
        held_out = read(validation_data) if validation_data else [item for part in split for item in part.validation]
        heads = choose_heads(config.heads, [item for part in parts for item in part] + held_out, bool(rankings))
        form: Any = {"heads": HeadTask, "generative": GenerativeTask}[config.form]
        super().__init__(config, "attributes", model, tokenizer, form.adapter, allow_reward_model=not form.writes)
        loaded, limits = self.loaded, config.limits
        module = form.build(config, loaded, heads)
        encoded = [form.encode(config, part.train, module, loaded, limits) for part in split]
        mixed: MixedExamples[Any] = MixedExamples(
            [example for part in encoded for example in part], list(map(len, encoded)), list(judgments.weights)
        )
        if rankings:
            encode = partial(encode_preferences, loaded=loaded, limits=limits, skip_bad_rows=config.skip_bad_rows)
            ranked = encode_mixture(rankings, encode)
            mixed = MixedExamples(
                [*mixed.examples, *ranked.examples], [*mixed.sizes, *ranked.sizes], [*mixed.weights, *ranked.weights]
            )
        if not mixed.examples or 0 in mixed.sizes:
            raise UserError("a source of the training data has nothing to learn from for these heads")
        validation = form.encode(config, held_out, module, loaded, limits)
        listed = ", ".join(f"{head.name} ({head.kind})" for head in heads)
        self.run.say(f"attributes: {len(mixed.examples)} examples, {len(validation)} held out; {config.form}: {listed}")
        engine = self.build_engine(module, mixed)
        self.task = form(self.run, config, loaded, engine, mixed.examples, validation, heads=heads)


def run_attribute_model(config: AttributeConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; returns the folder of the best model."""
    if not config.train_data and not config.rankings:
        raise UserError("train_data is '', but must be given: attribute judgments to learn from")
    data = (config.validation_data, config.rankings)
    return AttributeTrainer(config.model, config.train_data, config, *data).train()


if __name__ == "__main__":
    run_stage(AttributeConfig, run_attribute_model)
