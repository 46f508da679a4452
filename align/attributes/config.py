"""Settings of the attribute model."""

from dataclasses import dataclass
from typing import Literal

from align.settings import MixtureConfig, option, require_setting
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
    form: Literal["heads", "generative"] = option(
        "heads",
        "what attributes are read from: heads (a number each after the response: any model) or generative (LaMDA: the model "
        "itself writes the rating after an attribute's name, and responses too; one that generates text)",
    )
    generator_weight: float = option(
        1.0, "of form generative: weight of the loss on responses beside that on ratings; 0: it learns to rate alone"
    )
    generator_filter: str = option(
        "",
        "of form generative: what the attributes of a response must be for it to be learned, such as unsafe<0.5, "
        "sensible>0.5; empty: all responses are",
    )
    gate: bool = option(
        False,
        "of form heads: `preference` weighs the attributes by the prompt and reads no response itself (ArmoRM); rankings "
        "then teach the weights alone",
    )
    heads: list[str] = option(
        [],
        "attributes that get a head, each as NAME, NAME=binary (0 or 1) or NAME=scale (1 to 7); empty: all that are judged; "
        "without a kind, scale where a value is above 1",
    )
    epochs: int = option(1, "passes over all examples")
    batch_size: int = option(16, "responses and rankings in one update, over all processes")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "generator_weight", self.generator_weight >= 0, "0 or more")
        generative = self.form == "generative"
        require_setting(self, "generator_filter", generative or not self.generator_filter, "empty unless form is generative")
        require_setting(self, "gate", not (generative and self.gate), "false with form generative")
        require_setting(self, "rankings", not (generative and self.rankings), "empty: form generative has no head for them")
