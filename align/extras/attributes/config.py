"""Settings of attribute models."""

from dataclasses import dataclass
from typing import Literal

from align.core.settings import MixtureConfig, option, require_setting
from align.extras.rules.config import JudgmentConfig


@dataclass(kw_only=True)
class AttributeConfig(MixtureConfig, JudgmentConfig):
    """Several heads on one trunk: attributes of responses, and a preference (MT-DNN, Liu et al. 2019)."""

    train_data: str = option(
        "", "attribute judgments to learn from: file, folder or hub name; several are separated by commas, NAME=WEIGHT"
    )
    rankings: str = option(
        "", "rankings or pairs for another head, called `preference`; several as in train_data; empty: no such head"
    )
    validation_data: str = option(
        "",
        "held-out attribute judgments: metrics, and the choice of the best model; empty: validation_split of train_data's",
    )
    form: Literal["heads", "generative"] = option(
        "heads",
        "how attributes are computed: heads (a head each; for any model) or generative (as in LaMDA: a model that generates "
        "text learns to write responses, and the rating after an attribute's name)",
    )
    generator_filter: str = option(
        "",
        "with form generative: a response is learned if its attributes pass this, such as unsafe<0.5, sensible>0.5; empty: "
        "all responses are",
    )
    heads: list[str] = option(
        [],
        "attributes that get a head, each as NAME, NAME=binary (0 or 1) or NAME=scale (1 to 7); empty: all in the data; "
        "without a kind, scale if a value is above 1",
    )
    num_train_epochs: int = option(1, "passes over all examples")
    batch_size: int = option(16, "responses and rankings in one update, over all processes")

    def __post_init__(self) -> None:
        super().__post_init__()
        generative = self.form == "generative"
        require_setting(self, "generator_filter", generative or not self.generator_filter, "empty unless form is generative")
        require_setting(self, "rankings", not (generative and self.rankings), "empty: form generative has no head for them")
