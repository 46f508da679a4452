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
    """A policy that learns from rankings without a reward model; the reference is the initial policy."""

    needs = "a model and rankings of responses (train_data)"
    first_run = "configs/dpo/first-run.yaml"

    learning_rate: float = option(1e-6, "peak learning rate (1e-6 for all weights: DPO, appendix B; 1e-5 to 1e-4 with LoRA)")
    train_data: str = option(
        "data/rankings.jsonl",
        "rankings or pairs to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT; FILE[FIELD=COLUMN, ...] reads columns as fields",
    )
    validation_data: str = option("", "held-out rankings, which select the best policy; empty: none")
    num_train_epochs: int = option(1, "passes over the rankings")
    batch_size: int = option(32, "rankings in one update, over all processes (DPO: 64 pairs)")
    beta: float = option(0.1, "strength of the KL penalty (DPO: 0.1)", gt=0)
    loss: Literal["dpo", "ipo"] = option("dpo", "dpo, or ipo (Azar et al. 2023), which limits the margin of a pair")
    label_smoothing: float = option(
        0.0,
        "assumed probability of a wrong label, for dpo (cDPO, Mitchell 2023); 0: plain DPO",
        ge=0,
        lt=0.5,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        smooth = self.loss == "dpo" or not self.label_smoothing
        require_setting(self, "label_smoothing", smooth, "0 for ipo")
