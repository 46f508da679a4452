"""Settings of reward modeling."""

from dataclasses import dataclass

from align.core.settings import (
    MixtureConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SequenceConfig,
    SplitConfig,
    option,
)
from align.training.data_order import EpochConfig
from align.training.layerwise import LayerwiseConfig


@dataclass(kw_only=True)
class RewardConfig(
    MixtureConfig,
    SplitConfig,
    SequenceConfig,
    EpochConfig,
    ModelConfig,
    RunConfig,
    LayerwiseConfig,
    OptimizationConfig,
):
    """A reward model on rankings of 2 to 9 responses."""

    needs = "a model and rankings of responses (train_data)"
    first_run = "configs/reward/first-run.yaml"

    train_data: str = option(
        "data/rankings.jsonl",
        "rankings or pairs to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT; FILE[FIELD=COLUMN, ...] reads columns as fields",
    )
    validation_data: str = option("", "held-out rankings, which select the best model; empty: none")
    demonstrations: str = option(
        "",
        "demonstrations whose mean reward is subtracted from every reward (InstructGPT, section 3.5); empty: none",
    )
    num_train_epochs: int = option(1, "passes over the rankings; more than one overfits (InstructGPT, appendix C.2)")
    batch_size: int = option(16, "rankings in one update, over all processes (InstructGPT: 64)")
    centering_weight: float = option(
        0.0, "weight of the loss that centers rewards at 0 (Eisenstein et al. 2023: 0.01)", ge=0
    )
    lm_loss_weight: float = option(
        0.0, "weight of a language-model loss on the best-ranked responses (GPT-1, section 3.2: 0.5)", ge=0
    )
    soft_targets: bool = option(
        False, "train and validate on the probabilities in a ranking's field preferences instead of its ranks"
    )
