"""Scoring responses with a frozen attribute model."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from align.core.settings import ModelConfig
from align.extras.attributes.generative import GenerativeModel, Questions
from align.extras.attributes.model import AttributeModel, form_of, heads_of, in_label_units, load_attribute_model
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel, load
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import compute_dtype
from align.runtime.sharding import place_frozen_model
from align.tokenization import Tokenization
from align.tokenization.encoded import PromptResponse, SampledResponse


class AttributeScorer:
    """An attribute model of either form that reads each response once for all of its attributes.

    Args:
        policy: the tokenization of the model that writes the responses.
        budget: padded tokens that are read at once.
    """

    def __init__(self, folder: str, dtype: str, policy: Tokenization, accelerator: Accelerator, budget: int) -> None:
        model: AttributeModel | GenerativeModel
        self.heads, self.questions = heads_of(folder), None
        if form_of(folder) == "generative":
            model, loaded = load_generative_model(folder, dtype)
            self.questions = model.questions
        else:
            model, loaded = load_attribute_model(folder, dtype)
        own = None if loaded.tokenization.reads_alike(policy) else loaded.tokenization
        profile = flops_profile(loaded.backbone, loaded.adapter)
        self.module = place_frozen_model(model, accelerator)
        self.scorer = RewardModelScorer(self.module, 0.0, loaded.backbone, accelerator, budget, own, profile)

    @property
    def question_tokens(self) -> int:
        """Tokens of the longest question that is read after a response."""
        return max(len(text.question) for text in self.questions.texts) if self.questions else 0

    def __call__(self, responses: Sequence[SampledResponse]) -> list[dict[str, float]]:
        """The attributes of each response by name: probabilities, ratings from 1 to 7, and a ranking's reward."""
        names = [head.name for head in self.heads]
        ratings = self._ask(self.questions, responses) if self.questions else self._read_heads(responses)
        return [dict(zip(names, row, strict=True)) for row in ratings]

    def _read_heads(self, responses: Sequence[SampledResponse]) -> list[list[float]]:
        outputs = torch.tensor(self.scorer(responses), dtype=torch.float64).reshape(len(responses), -1)
        ratings: list[list[float]] = in_label_units(outputs, self.heads).tolist()
        return ratings

    def _ask(self, questions: Questions, responses: Sequence[SampledResponse]) -> list[list[float]]:
        """Ratings from next-token probabilities; all questions share one reading of a response."""
        encoded = [self.scorer.encode(response) for response in responses]
        rows = [PromptResponse([*row.prompt, *row.response], text.question) for row in encoded for text in questions.texts]
        answers = torch.tensor(self.scorer.score_rows(rows), dtype=torch.float64).reshape(len(rows), -1)
        count = len(self.heads)
        ratings = questions.ratings(answers, [*range(count)] * len(encoded))
        return [ratings[start : start + count] for start in range(0, len(ratings), count)]


def load_generative_model(folder: str, dtype: str) -> tuple[GenerativeModel, LoadedModel]:
    """Load an attribute model of the generative form to score with: adapters merged, nothing trainable."""
    loaded = load(ModelConfig(model=folder), compute_dtype(dtype))
    model = GenerativeModel(loaded.backbone, Questions(heads_of(folder), loaded.tokenization))
    return model.eval().requires_grad_(False), loaded
