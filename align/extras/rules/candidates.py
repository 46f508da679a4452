"""Rules and rubrics in the choice of `align sample` among several responses to a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerate import Accelerator

from align.commands.sample import CandidateScorer, scorer_of
from align.core.settings import option
from align.extras.rules.rubrics import RubricScorer, RubricSettings, load_rubrics
from align.extras.rules.scoring import RuleModelSettings, RuleScorer, RuleUse, best_response, rules_of_model
from align.models.loading import LoadedModel
from align.reward.checkpoint import RULE, load_reward_model
from align.runtime.distributed import computes_on_cpu
from align.tokenization.encoded import EncodedPrompt, SampledResponse


@dataclass(kw_only=True)
class RuleChoiceSettings(RuleModelSettings):
    """A rule model whose verdicts are written, and decide which response is kept."""

    use: RuleUse = option(
        "filter",
        "how rules choose with best_of: filter keeps responses whose geometric mean of P(follows) is at least "
        "threshold, then the best reward; multiply takes the product of that mean with the reward's probability",
    )
    threshold: float = option(0.5, "see use; where no response is left, the one that obeys most is kept", ge=0, le=1)


class RuleCandidates(CandidateScorer):
    """Judges candidates by a rule model, and keeps one of them."""

    def __init__(self, settings: RuleChoiceSettings) -> None:
        self.settings, self.rules = settings, rules_of_model(settings.model, settings.rules)
        self.violates: dict[str, list[float]] = {}

    def score(
        self, policy: LoadedModel, prompts: Sequence[EncodedPrompt], rows: Sequence[SampledResponse], dtype: str, budget: int
    ) -> None:
        judge = load_reward_model(self.settings.model, dtype, kind=RULE)
        given = RuleScorer(scorer_of(policy, judge, budget), self.rules, judge.loaded.tokenization)(rows)
        self.violates = dict(zip(self.rules, given.tolist(), strict=True))

    def choose(self, candidates: Mapping[int, float]) -> dict[int, float]:
        rows, rewards = list(candidates), list(candidates.values())
        follows = [[1 - probabilities[row] for probabilities in self.violates.values()] for row in rows]
        best = best_response(rewards, follows, self.settings.use, self.settings.threshold)
        return {rows[best]: rewards[best]}

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        return {"violates": {rule: [round(given[row], 6) for row in kept] for rule, given in self.violates.items()}}


class RubricCandidates(CandidateScorer):
    """Adds the rewards of rubrics to those of candidates."""

    def __init__(self, settings: RubricSettings) -> None:
        self.settings = settings
        self.scores: list[tuple[RubricScorer, list[float]]] = []

    def score(
        self, policy: LoadedModel, prompts: Sequence[EncodedPrompt], rows: Sequence[SampledResponse], dtype: str, budget: int
    ) -> None:
        conversations, texts = [prompt.conversation for prompt in prompts], [row.text for row in rows]
        categories = [prompt.category for prompt in prompts]
        for scorer in load_rubrics(self.settings, Accelerator(cpu=computes_on_cpu()), dtype, budget):
            self.scores.append((scorer, scorer(conversations, texts, categories)))

    def choose(self, candidates: Mapping[int, float]) -> dict[int, float]:
        found = dict(candidates)
        for scorer, scores in self.scores:
            found = {row: reward + scorer.rubric.weight * scores[row] for row, reward in found.items()}
        return found

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        return {"rubrics": {scorer.rubric.name: [round(given[row], 6) for row in kept] for scorer, given in self.scores}}
