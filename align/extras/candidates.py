"""Selection among responses in `align sample` by attributes and rules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accelerate import Accelerator

from align.commands.sample import CandidateScorer, scorer_of
from align.core.settings import Settings, option
from align.extras.attributes.attribute_rewards import AttributeScorer
from align.extras.attributes.expressions import Condition, Expression, choose
from align.extras.attributes.model import heads_of
from align.extras.rules.judgments import RuleModelSettings, RuleScorer, rules_of_model
from align.models.loading import LoadedModel
from align.reward.checkpoint import RULE, load_reward_model
from align.runtime.distributed import computes_on_cpu
from align.tokenization.encoded import EncodedPrompt, SampledResponse

RuleUse = Literal["filter", "multiply"]


@dataclass(kw_only=True)
class AttributeChoiceSettings(Settings):
    """Attribute model that filters and ranks candidates. Its attributes are saved."""

    model: str = option("", "Attribute model folder (trained by `align attributes`).", required=True)
    filter: str = option("", "Conditions that the candidates of best_of must meet, such as unsafe<0.2, sensible>0.5.")
    rank: str = option(
        "", "Expression that ranks the candidates, such as 3*sensible+specific. Default: rank by reward and rules."
    )


class AttributeCandidates(CandidateScorer):
    """Filters and ranks candidates by expressions over their attributes."""

    def __init__(self, settings: AttributeChoiceSettings, dtype: str, budget: int) -> None:
        super().__init__(settings, dtype, budget)
        names = [head.name for head in heads_of(settings.model)]
        self.condition = Condition(settings.filter, names, "attributes.filter") if settings.filter else None
        self.rank = Expression(settings.rank, names, "attributes.rank") if settings.rank else None

    def score(self, policy: LoadedModel, prompts: Sequence[EncodedPrompt], rows: Sequence[SampledResponse]) -> None:
        options = (self.dtype, policy.tokenization, Accelerator(cpu=computes_on_cpu()), self.budget)
        self.attributes = AttributeScorer(self.settings.model, *options)(rows)

    def choose(self, candidates: Mapping[int, float]) -> dict[int, float]:
        kept = choose({row: self.attributes[row] for row in candidates}, self.condition, self.rank)
        return {row: candidates[row] for row in kept}

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        names = self.attributes[0]
        return {"attributes": {name: [round(self.attributes[row][name], 6) for row in kept] for name in names}}


@dataclass(kw_only=True)
class RuleChoiceSettings(RuleModelSettings):
    """Rule model that selects among candidates. Its verdicts are saved."""

    use: RuleUse = option(
        "filter",
        "How rules select among best_of candidates. filter: highest reward among those whose geometric mean of "
        "P(follows) reaches threshold. multiply: highest product of that mean and the reward's probability.",
    )
    threshold: float = option(
        0.5, "Threshold of use filter. If no candidate reaches it, the one with the highest mean is saved.", ge=0, le=1
    )


class RuleCandidates(CandidateScorer):
    """Judges candidates with a rule model and selects one."""

    def __init__(self, settings: RuleChoiceSettings, dtype: str, budget: int) -> None:
        super().__init__(settings, dtype, budget)
        self.rules = rules_of_model(settings.model, settings.rules)

    def score(self, policy: LoadedModel, prompts: Sequence[EncodedPrompt], rows: Sequence[SampledResponse]) -> None:
        judge = load_reward_model(self.settings.model, self.dtype, kind=RULE)
        violations = RuleScorer(scorer_of(policy, judge, self.budget), self.rules, judge.loaded.tokenization)(rows)
        self.violates: dict[str, list[float]] = dict(zip(self.rules, violations.tolist(), strict=True))

    def choose(self, candidates: Mapping[int, float]) -> dict[int, float]:
        rows, rewards = list(candidates), list(candidates.values())
        follows = [[1 - probabilities[row] for probabilities in self.violates.values()] for row in rows]
        best = best_response(rewards, follows, self.settings.use, self.settings.threshold)
        return {rows[best]: rewards[best]}

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        return {
            "violates": {
                rule: [round(probabilities[row], 6) for row in kept] for rule, probabilities in self.violates.items()
            }
        }


def geometric_mean(probabilities: Sequence[float]) -> float:
    """(p1 x ... x pK)^(1/K): 0 if any is 0, 1 if there are none."""
    if min(probabilities, default=1.0) <= 0.0:
        return 0.0
    return math.exp(sum(map(math.log, probabilities)) / max(1, len(probabilities)))


def best_response(rewards: Sequence[float], follows: Sequence[Sequence[float]], use: RuleUse, threshold: float) -> int:
    """Return the index of the best response, the first if tied.

    Args:
        rewards: [N] preference rewards; all equal without a preference model.
        follows: [N, K] probability that each response follows each rule.
        use: `filter` selects the highest reward among responses whose geometric mean over rules is at least `threshold`, or
            else the highest geometric mean. `multiply` selects the highest sigmoid(reward - mean reward) x geometric mean
            (after Glaese et al. 2022, section 2.7).
    """
    compliance, mean = [geometric_mean(probabilities) for probabilities in follows], sum(rewards) / len(rewards)
    scores = compliance
    if use == "multiply":  # sigmoid via tanh, which does not overflow
        scores = [(1 + math.tanh((reward - mean) / 2)) / 2 * rule for reward, rule in zip(rewards, compliance, strict=True)]
    elif passing := [number for number, rule in enumerate(compliance) if rule >= threshold]:
        return max(passing, key=rewards.__getitem__)
    return max(range(len(scores)), key=scores.__getitem__)
