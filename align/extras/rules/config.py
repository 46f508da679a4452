"""Settings of the stages that learn from judgments of single responses, and those of rule models."""

from dataclasses import dataclass

from align.core.settings import option, require_setting
from align.training.data_order import EpochConfig


@dataclass(kw_only=True)
class JudgmentConfig(EpochConfig):
    """Settings of the stages that learn from judgments of single responses."""

    validation_split: float = option(
        0.1,
        "share of the conversations that is held out, with all of their judgments, where validation_data is empty",
        ge=0,
        lt=1,
    )


@dataclass(kw_only=True)
class RuleConfig(JudgmentConfig):
    """A rule model (Sparrow, Glaese et al. 2022): it reads a conversation, a response and a rule, and predicts how likely
    the response violates the rule."""

    train_data: str = option(
        "data/rule_judgments.jsonl", "rule judgments that the labeling app exported: file, folder or hub name"
    )
    validation_data: str = option(
        "", "held-out judgments: metrics, and the choice of the best model; empty: validation_split of train_data's"
    )
    rules: list[str] = option(
        ["forms/rules/sparrow-dialogue.yaml"],
        "files of rules whose texts the model reads, or FILE:ID for one rule; judgments by other rules are an error",
    )
    held_out_rules: list[str] = option([], "ids of rules that are never trained on, to see how unseen rules are judged")
    num_train_epochs: int = option(1, "passes over the judged responses")
    batch_size: int = option(16, "judged responses in one update, over all processes; each comes with all of its rules")
    max_prompt_tokens: int = option(1024, "longest conversation, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "rules", bool(self.rules), "given: the model reads the texts of the rules")
