"""Attributes in the choice of `align sample` among several responses to a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerate import Accelerator

from align.commands.sample import CandidateScorer
from align.core.settings import Settings, option
from align.extras.attributes.expressions import Condition, Expression
from align.extras.attributes.model import heads_of
from align.extras.attributes.scoring import AttributeScorer
from align.models.loading import LoadedModel
from align.runtime.distributed import computes_on_cpu
from align.tokenization.encoded import EncodedPrompt, SampledResponse


@dataclass(kw_only=True)
class AttributeChoiceSettings(Settings):
    """An attribute model whose attributes are written, and decide which response is kept."""

    model: str = option("", "folder of an attribute model (`align attributes`)", required=True)
    filter: str = option(
        "", "what its attributes must be for a candidate of best_of, such as unsafe<0.2, sensible>0.5; empty: anything"
    )
    rank: str = option("", "the quantity that ranks candidates, such as 3*sensible+specific; empty: the reward and rules")


class AttributeCandidates(CandidateScorer):
    """Filters and ranks candidates by expressions over their attributes.

    Raises:
        UserError: for an expression that the model cannot answer.
    """

    def __init__(self, settings: AttributeChoiceSettings) -> None:
        self.folder, names = settings.model, [head.name for head in heads_of(settings.model)]
        self.condition = Condition(settings.filter, names, "attributes.filter") if settings.filter else None
        self.rank = Expression(settings.rank, names, "attributes.rank") if settings.rank else None
        self.attributes: list[dict[str, float]] = []

    def score(
        self, policy: LoadedModel, prompts: Sequence[EncodedPrompt], rows: Sequence[SampledResponse], dtype: str, budget: int
    ) -> None:
        accelerator = Accelerator(cpu=computes_on_cpu())
        self.attributes = AttributeScorer.from_folder(self.folder, dtype, policy.tokenization, accelerator, budget)(rows)

    def choose(self, candidates: Mapping[int, float]) -> dict[int, float]:
        found = {
            row: reward
            for row, reward in candidates.items()
            if self.condition is None or self.condition.holds(self.attributes[row])
        }
        if not found or self.rank is None:
            return found
        rank = self.rank
        best = max(found, key=lambda row: rank(self.attributes[row]))
        return {best: found[best]}

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        names = self.attributes[0]
        return {"attributes": {name: [round(self.attributes[row][name], 6) for row in kept] for name in names}}
