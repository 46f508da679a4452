"""Settings of the attribute model."""

from dataclasses import dataclass

from align.settings import MixtureConfig, option
from align.training.epochs import JudgmentConfig


@dataclass(kw_only=True)
class AttributeConfig(MixtureConfig, JudgmentConfig):
    """Several heads on one trunk: attributes of responses, and a ranking beside them (MT-DNN, Liu et al. 2019)."""

    train_data: str = option(
        "", "attribute judgments to learn from: file, folder or hub name; several are separated by commas, NAME=WEIGHT"
    )
    rankings: str = option(
        "", "rankings or pairs for a head called `preference` beside them; several as in train_data; empty: no such head"
    )
    validation_data: str = option(
        "", "held-out attribute judgments: metrics, and the choice of the best model; empty: held_out_share of train_data's"
    )
    heads: list[str] = option(
        [],
        "attributes that get a head, each as NAME, NAME=binary (0 or 1) or NAME=scale (1 to 7); empty: all that are judged; "
        "without a kind, scale where a value is above 1",
    )
    epochs: int = option(1, "passes over all examples")
    batch_size: int = option(16, "responses and rankings in one update, over all processes")
