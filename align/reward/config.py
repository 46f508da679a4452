"""Settings of reward modeling."""

from dataclasses import dataclass

from align.core.settings import (
    MixtureConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SplitConfig,
    option,
)
from align.training.data_order import EpochConfig
from align.training.layerwise import LayerwiseConfig


@dataclass(kw_only=True)
class RewardConfig(
    MixtureConfig,
    SplitConfig,
    EpochConfig,
    ModelConfig,
    RunConfig,
    LayerwiseConfig,
    OptimizationConfig,
):
    """Reward model training on rankings of 2 to 9 responses."""

    needs = "a model and rankings of responses (train_data)"
    first_run = "configs/reward/first-run.yaml"

    train_data: str = option(
        "data/rankings.jsonl",
        "Training rankings or pairs: file, folder or Hub id. Separate several by commas, each NAME or NAME=WEIGHT. "
        "Use FILE[FIELD=COLUMN, ...] to rename columns.",
    )
    validation_data: str = option("", "Held-out rankings, used to select the best model.")
    demonstrations: str = option(
        "",
        "Demonstrations whose mean reward is shifted to 0 (InstructGPT, section 3.5).",
    )
    num_train_epochs: int = option(1, "Number of training epochs. More than one overfits (InstructGPT, appendix C.2).")
    batch_size: int = option(16, "Rankings per update, over all processes (InstructGPT: 64).")
    centering_weight: float = option(0.0, "Weight of the reward centering loss (Eisenstein et al. 2023: 0.01).", ge=0)
    lm_loss_weight: float = option(
        0.0, "Weight of a language-model loss on the best-ranked responses (GPT-1, section 3.2: 0.5).", ge=0
    )
    soft_targets: bool = option(
        False, "Train and validate on the probabilities in the preferences field instead of on ranks."
    )
