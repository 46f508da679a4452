"""Settings of direct preference optimization."""

from dataclasses import dataclass
from typing import Literal

from align.core.settings import (
    MixtureConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SplitConfig,
    option,
    require_setting,
)
from align.training.data_order import EpochConfig


@dataclass(kw_only=True)
class DPOConfig(MixtureConfig, SplitConfig, EpochConfig, ModelConfig, RunConfig, OptimizationConfig):
    """Direct preference optimization (DPO) on rankings. The reference is the initial policy."""

    needs = "a model and rankings of responses (train_data)"
    first_run = "configs/dpo/first-run.yaml"

    learning_rate: float = option(1e-6, "Peak learning rate. 1e-5 to 1e-4 with LoRA.")
    train_data: str = option(
        "data/rankings.jsonl",
        "Training rankings or pairs: file, folder or Hub id. Separate several by commas, each NAME or NAME=WEIGHT. "
        "Use FILE[FIELD=COLUMN, ...] to rename columns.",
    )
    validation_data: str = option("", "Held-out rankings, used to select the best policy.")
    num_train_epochs: int = option(1, "Number of training epochs.")
    batch_size: int = option(32, "Rankings per update, over all processes (DPO: 64 pairs).")
    beta: float = option(0.1, "KL penalty strength (DPO: 0.1).", gt=0)
    loss: Literal["dpo", "ipo"] = option("dpo", "Loss. ipo (Azar et al. 2023) has a finite target margin.")
    label_smoothing: float = option(
        0.0,
        "Assumed probability that a label is wrong (cDPO, Mitchell 2023). dpo only. 0 disables it.",
        ge=0,
        lt=0.5,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        smooth = self.loss == "dpo" or not self.label_smoothing
        require_setting(self, "label_smoothing", smooth, "0 for ipo")
