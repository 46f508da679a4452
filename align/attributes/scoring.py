"""Scoring responses of any policy with a frozen attribute model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from align.attributes.expressions import Expression
from align.attributes.generative import GenerativeModel, Questions
from align.attributes.model import AttributeModel, Head, form_of, heads_of, in_label_units, load_attribute_model
from align.core.settings import ModelConfig
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel, load
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import compute_dtype
from align.runtime.sharding import place_frozen_model
from align.tokenization import Tokenization
from align.tokenization.encoded import PromptResponse, SampledResponse


class AttributeReward:
    """A reward: an expression over the attributes that a model predicts. Raises: see `Expression`."""

    def __init__(self, scorer: "AttributeScorer", expression: str) -> None:
        self.scorer = scorer
        names = [head.name for head in scorer.heads]
        self.expression = Expression(expression, names, "attribute_reward")

    def __call__(self, responses: Sequence[SampledResponse]) -> list[float]:
        """The value of the expression for each response."""
        return [self.expression(values) for values in self.scorer(responses)]


class AttributeScorer(ABC):
    """An attribute model that reads each response once for all of its attributes.

    Args:
        policy: the tokenization of the model that writes the responses.
        budget: padded tokens that are read at once.
    """

    def __init__(
        self,
        heads: list[Head],
        module: nn.Module,
        loaded: LoadedModel,
        policy: Tokenization,
        accelerator: Accelerator,
        budget: int,
    ) -> None:
        self.heads = heads
        own = None if loaded.tokenization.reads_alike(policy) else loaded.tokenization
        shape = flops_profile(loaded.backbone, loaded.adapter)
        self.module = place_frozen_model(module, accelerator)
        self.scorer = RewardModelScorer(self.module, 0.0, loaded.backbone, accelerator, budget, own, shape)

    question_tokens = 0
    """Tokens of the longest question that is read behind a response."""

    @staticmethod
    def from_folder(
        folder: str, dtype: str, policy: Tokenization, accelerator: Accelerator, budget: int
    ) -> "AttributeScorer":
        """The scorer of an attribute model on disk, of either form. Raises: UserError if it is not one."""
        common = (policy, accelerator, budget)
        if form_of(folder) == "generative":
            return GenerativeScorer(*load_generative_model(folder, dtype), *common)
        return HeadScorer(*load_attribute_model(folder, dtype), *common)

    @abstractmethod
    def __call__(self, responses: Sequence[SampledResponse]) -> list[dict[str, float]]:
        """The attributes of each response by name: probabilities, ratings from 1 to 7, and a ranking's reward."""

    def _named(self, rows: Sequence[Sequence[float]]) -> list[dict[str, float]]:
        names = [head.name for head in self.heads]
        return [dict(zip(names, row, strict=True)) for row in rows]


class HeadScorer(AttributeScorer):
    """Reads attributes from the heads of a model."""

    def __init__(self, model: AttributeModel, *arguments: Any) -> None:
        super().__init__(model.heads, model, *arguments)

    def __call__(self, responses: Sequence[SampledResponse]) -> list[dict[str, float]]:
        outputs = cast(list[list[float]], self.scorer(responses))
        ratings = in_label_units(torch.tensor(outputs, dtype=torch.float64).reshape(len(responses), -1), self.heads)
        return self._named(ratings.tolist())


class GenerativeScorer(AttributeScorer):
    """Reads attributes from a language model's next-token probabilities; all questions share one reading of a response."""

    def __init__(self, model: GenerativeModel, *arguments: Any) -> None:
        super().__init__(model.questions.heads, model, *arguments)
        self.questions = model.questions
        self.question_tokens = max(len(text.question) for text in self.questions.texts)

    def __call__(self, responses: Sequence[SampledResponse]) -> list[dict[str, float]]:
        encoded = [self.scorer.encode(response) for response in responses]
        rows = [
            PromptResponse([*row.prompt, *row.response], text.question) for row in encoded for text in self.questions.texts
        ]
        answers = torch.tensor(self.scorer.score_rows(rows), dtype=torch.float64).reshape(len(rows), -1)
        count = len(self.heads)
        ratings = self.questions.ratings(answers, [*range(count)] * len(encoded))
        return self._named([ratings[start : start + count] for start in range(0, len(ratings), count)])


def load_generative_model(folder: str, dtype: str = "auto") -> tuple[GenerativeModel, LoadedModel]:
    """Load an attribute model of the generative form to score with: adapters merged, nothing trainable."""
    loaded = load(ModelConfig(model=folder), compute_dtype(dtype))
    model = GenerativeModel(loaded.backbone, Questions(heads_of(folder), loaded.tokenization))
    return model.eval().requires_grad_(False), loaded
