"""Judging responses by rules, and choosing among several by rules and a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from align.core.files import read_json
from align.core.settings import Settings, option
from align.data.rules import choose_rules
from align.extras.rules.judgments import rule_ids
from align.reward.checkpoint import RULE, require_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization import Tokenization
from align.tokenization.encoded import PromptResponse, SampledResponse


@dataclass(kw_only=True)
class RuleModelSettings(Settings):
    """A rule model, and the rules that it judges by."""

    model: str = option("", "folder of a rule model (`align rules`) that judges responses", required=True)
    rules: list[str] = option(
        [], "rules to judge: files of rules, FILE:ID, or ids of training rules; empty: all training rules"
    )


def rules_of_model(folder: str, wanted: Sequence[str] = ()) -> dict[str, str]:
    """The texts of the rules that a rule model judges by, by their ids; `wanted` is as in `RuleModelSettings`.

    Raises:
        UserError: if the folder is no rule model, or a rule is unknown.
    """
    require_reward_model(folder, RULE)
    trained = read_json(Path(folder) / RULE.metadata_file)["rules"]
    return choose_rules(wanted, trained, f"{folder}: among the model's own rules")


class RuleScorer:
    """A rule model that judges responses by some rules; each response is read once for all of them.

    Args:
        scorer: computes the model's logit of a violation.
        rules: texts by id.
        tokenization: the model's own.
    """

    def __init__(self, scorer: RewardModelScorer, rules: Mapping[str, str], tokenization: Tokenization) -> None:
        self.scorer, self.rules = scorer, dict(rules)
        self._ids = [rule_ids(tokenization, text) for text in self.rules.values()]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rule."""
        return tuple(map(len, self._ids))

    def __call__(self, responses: Sequence[SampledResponse]) -> Tensor:
        """How likely each response violates each rule, [rules, responses] float32; the same on every process."""
        encoded = [self.scorer.encode(response) for response in responses]
        rows = [PromptResponse([*row.prompt, *row.response], rule) for row in encoded for rule in self._ids]
        logits = torch.tensor(self.scorer.score_rows(rows), dtype=torch.float64)
        return torch.sigmoid(logits).float().reshape(len(encoded), len(self._ids)).T
