"""Training of attribute models: examples of all tasks are mixed and shuffled, each with its task's loss (MT-DNN).

Launch it with `accelerate launch align/extras/attributes/train.py --config configs/attributes/x.yaml`. It shares the loop
of rule models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, records_of
from align.batches.mixtures import MixedExamples, Mixture, TrainingData, encode_mixture, is_given, mixture_of
from align.core.errors import UserError, counted, nearest_name_hint
from align.core.launch import run_stage
from align.core.settings import MixtureConfig, ModelConfig, OptimizationConfig, RunConfig, option, require_setting
from align.data.records import AttributeJudgment
from align.extras.attributes.generative import GenerativeForm
from align.extras.attributes.heads import HeadForm, encode_preferences
from align.extras.attributes.model import PREFERENCE, SCALE, Form, Head
from align.extras.rules.judgments import JudgedResponse, mean_judgments, split_judgments
from align.extras.rules.train import JudgmentConfig, train
from align.models.roles import REWARD_ADAPTER
from align.training.data_order import DataOrder, EpochConfig
from align.training.model_source import Model, ModelSource
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, with_data_names

BOUNDS = {"binary": (0.0, 1.0), "scale": SCALE}


@dataclass(kw_only=True)
class AttributeConfig(MixtureConfig, JudgmentConfig, EpochConfig, ModelConfig, RunConfig, OptimizationConfig):
    """Attribute model: several heads on one backbone, for attributes of responses and for preference (MT-DNN, Liu et al.
    2019).
    """

    train_data: str = option(
        "", "Training attribute judgments: file, folder or Hub id. Separate several by commas, each NAME or NAME=WEIGHT."
    )
    rankings: str = option("", "Rankings or pairs to train an additional head named preference. Several as in train_data.")
    validation_data: str = option(
        "",
        "Held-out attribute judgments, used for metrics and to select the best model. Default: validation_split of "
        "train_data.",
    )
    form: Form = option(
        "heads",
        "heads: one head per attribute. generative: a language model writes responses and their ratings (LaMDA).",
    )
    generator_filter: str = option(
        "",
        "Conditions on the responses that train the generator, such as unsafe<0.5, sensible>0.5. Requires form "
        "generative. Default: all responses.",
    )
    heads: list[str] = option(
        [],
        "Attributes to train, each NAME, NAME=binary (0 or 1) or NAME=scale (1 to 7). Without a kind, attributes "
        "with values above 1 are scales. Default: all attributes in the data.",
    )
    num_train_epochs: int = option(1, "Number of training epochs.")
    batch_size: int = option(16, "Responses and rankings per update, over all processes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        generative = self.form == "generative"
        require_setting(self, "generator_filter", generative or not self.generator_filter, "empty unless form is generative")
        require_setting(self, "rankings", not (generative and self.rankings), "empty with form generative")


def read_ratings(data: Data, skip_bad_rows: bool) -> list[JudgedResponse]:
    """Return responses with the means of their attributes. Raise a UserError if a row is invalid."""
    records = records_of(data, AttributeJudgment, skip_bad_rows)
    return mean_judgments(
        (record.prompt, record.response, name, value) for record in records for name, value in record.attributes.items()
    )


def choose_heads(wanted: Sequence[str], rated: Sequence[JudgedResponse], has_rankings: bool) -> list[Head]:
    """Return the heads of a model, in a fixed order.

    Args:
        wanted: NAME, NAME=binary or NAME=scale. If empty, every attribute.
        rated: judged responses, whose values determine the kind if none is given.
        has_rankings: whether to add a head for the preference.

    Raises:
        UserError: if an attribute has no judgments, an unknown kind or a value outside its kind, or there are no heads.
    """
    values: dict[str, list[float]] = {}
    for item in rated:
        for name, value in item.targets.items():
            values.setdefault(name, []).append(value)
    heads: list[Head] = []
    for text in wanted or sorted(values):
        name, _, kind = text.partition("=")
        if name not in values:
            raise UserError(f"heads: no judgments of '{name}'{nearest_name_hint(name, values)}")
        low, high = min(values[name]), max(values[name])
        kind = kind or ("scale" if high > 1 else "binary")
        if kind not in BOUNDS:
            raise UserError(f"heads: {text!r}: the kind must be binary or scale")
        least, most = BOUNDS[kind]
        if not least <= low <= high <= most:
            span = f"from {low:g} to {high:g}"
            raise UserError(f"heads: '{name}' has values {span}, but kind {kind} allows {least:g} to {most:g}")
        heads.append(Head(name, "scale" if kind == "scale" else "binary"))
    heads += [Head(PREFERENCE, "ranking")] if has_rankings else []
    names = [head.name for head in heads]
    if not names or len(set(names)) < len(names):
        raise UserError(f"heads: {', '.join(names) or 'none'}; set at least one, without duplicates")
    return heads


class AttributeTrainer:
    """Trainer of attribute models.

        rows = [{"prompt": "Hi", "response": "Hello!", "attributes": {"sensible": 1, "unsafe": 0, "rating": 6}}]
        folder = AttributeTrainer("smollm2-135m", rows, AttributeConfig(output_dir="runs/attributes")).train()

    For arguments, see `SFTTrainer`. Without `validation_data`, a fraction of `train_data` is held out.
    `rankings` train a head named `preference`.
    """

    @making_trainer()
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
        source = ModelSource(model, tokenizer)
        run = Run(source.settings(config), "attributes")
        loaded = source.load(run, "policy" if generative else REWARD_ADAPTER, allow_reward_model=not generative)
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
            raise UserError("a source of the training data has no examples for these heads")
        self.config, self.loaded, self.form = config, loaded, form
        self.held_out: list[Any] = list(form.encode(held_out, config.limits))
        listed = ", ".join(f"{head.name} ({head.kind})" for head in heads)
        run.print(f"attributes: {counted(len(examples), 'example')}, {len(self.held_out)} held out; {config.form}: {listed}")
        mixed = MixedExamples(examples, sizes, weights)
        self.order: DataOrder[Any] = DataOrder(
            mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature
        )
        run.print(run.memory.check(module))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def train(self) -> Path:
        """Train from the last checkpoint. Return the folder of the best model."""
        data = ", ".join(filter(None, (self.config.train_data, self.config.rankings)))
        with self.engine.run:
            return train(self.form, self.engine, self.order, self.held_out, data, self.config.eval_steps)


def run_attribute_model(config: AttributeConfig) -> Path:
    """Train `config.model` on the judgments in `config.train_data`; return the folder of the best model."""
    if not config.train_data and not config.rankings:
        raise UserError("train_data is '', but must be set to attribute judgments")
    data = (config.validation_data, config.rankings)
    return AttributeTrainer(config.model, config.train_data, config, *data).train()


if __name__ == "__main__":
    run_stage(AttributeConfig, run_attribute_model)
