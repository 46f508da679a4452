"""Settings of `align sample`."""

from dataclasses import dataclass

from align.core.settings import option, require_setting
from align.rules.rubrics import RubricSettings
from align.rules.scoring import RuleUse
from align.sampling.settings import AnsweringConfig, PrimerSettings


@dataclass(kw_only=True)
class SampleConfig(PrimerSettings, RubricSettings, AnsweringConfig):
    """Which model answers which prompts, and how the answers that are kept are chosen."""

    model: str = option("", "model to sample from: a folder, a hub name or a built-in model")
    prompts: str = option("data/prompts.jsonl", "prompts: file, folder or hub name")
    output: str = option("", "JSON Lines file to write; it must not exist yet")
    samples_per_prompt: int = option(1, "responses that are kept for each prompt")
    best_of: int = option(
        1,
        "responses drawn for each one that is kept, the best by reward_model, rule_model and rubrics; 1: no selection",
    )
    reward_model: str = option("", "folder of a reward model whose rewards are written too; empty: none")
    rule_model: str = option("", "folder of a rule model whose verdicts are written too; empty: none")
    rules: list[str] = option(
        [], "rules that it judges by: files of rules, FILE:ID, or ids that it was trained on; empty: all of those"
    )
    rule_use: RuleUse = option(
        "filter",
        "how rules choose with best_of: filter keeps responses whose geometric mean of P(follows) is at least "
        "rule_threshold, then the best reward; multiply takes the product of that mean with the reward's probability",
    )
    rule_threshold: float = option(0.5, "see rule_use; where no response is left, the one that obeys most is kept")

    attribute_model: str = option("", "folder of an attribute model whose attributes are written too; empty: none")
    filter: str = option(
        "", "what its attributes must be for a candidate of best_of, such as unsafe<0.2, sensible>0.5; empty: anything"
    )
    rank: str = option(
        "", "what is highest for the best candidate, such as 3*sensible+specific; empty: the reward and rules"
    )
    fallback: str = option("", "what is written where filter leaves no candidate; empty: the prompt is left out and counted")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("filter", "rank"):
            given = bool(self.attribute_model) or not getattr(self, name)
            require_setting(self, name, given, "empty without attribute_model")
        for name in ("model", "output"):
            require_setting(self, name, bool(getattr(self, name)), "given")
        for name in ("samples_per_prompt", "best_of"):
            require_setting(self, name, getattr(self, name) > 0, "above 0")
        chooses = bool(self.reward_model or self.rule_model or self.rubrics or self.attribute_model)
        by = "unless reward_model, rule_model, rubrics or attribute_model is given"
        require_setting(self, "best_of", self.best_of == 1 or chooses, f"1, {by}")
        require_setting(self, "rules", bool(self.rule_model) or not self.rules, "empty without rule_model")
        require_setting(self, "rule_threshold", 0 <= self.rule_threshold <= 1, "a share from 0 to 1")
        require_setting(self, "output", self.output.endswith(".jsonl"), "a name that ends in .jsonl")
