"""Judging responses by rules, and choosing among several by rules and a reward."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
        [], "rules that it judges by: files of rules, FILE:ID, or ids that it was trained on; empty: all of those"
    )


def rules_of_model(folder: str, wanted: Sequence[str] = ()) -> dict[str, str]:
    """The texts of the rules that a rule model judges by, by their ids.

    Args:
        wanted: files of rules, FILE:ID, or ids of rules that the model was trained on; empty: all of those.

    Raises:
        UserError: if the folder is no rule model, or a rule is unknown.
    """
    require_reward_model(folder, RULE)
    return choose_rules(
        wanted, read_json(Path(folder) / RULE.metadata_file)["rules"], f"{folder}: among the model's own rules"
    )


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


RuleUse = Literal["filter", "multiply"]


def geometric_mean(probabilities: Sequence[float]) -> float:
    """(p1 x ... x pK)^(1/K): 0 if any is 0, and 1 if there are none."""
    if not probabilities:
        return 1.0
    if min(probabilities) <= 0.0:
        return 0.0
    return math.exp(sum(map(math.log, probabilities)) / len(probabilities))


def best_response(rewards: Sequence[float], follows: Sequence[Sequence[float]], use: RuleUse, threshold: float) -> int:
    """The index of the best response; of several equally good ones, the first.

    Args:
        rewards: [N] of the preference; all equal without one.
        follows: [N, K], how likely each response follows each rule.
        use: `filter` takes the highest reward among responses whose geometric mean over rules is at least `threshold`; if
            there is none, the highest geometric mean. `multiply` takes the highest sigmoid(reward - mean reward) x
            geometric mean (after Glaese et al. 2022, section 2.7).
    """
    compliance, mean = [geometric_mean(each) for each in follows], sum(rewards) / len(rewards)
    if use == "multiply":
        scores = [_sigmoid(reward - mean) * rule for reward, rule in zip(rewards, compliance, strict=True)]
        return max(range(len(scores)), key=scores.__getitem__)
    passing = [number for number, rule in enumerate(compliance) if rule >= threshold]
    return max(passing, key=rewards.__getitem__) if passing else max(range(len(compliance)), key=compliance.__getitem__)


def _sigmoid(value: float) -> float:
    return 0.5 * (1.0 + math.tanh(value / 2))
