"""What a frozen attribute model says of responses, whoever wrote them."""

from collections.abc import Sequence
from typing import cast

import torch
from accelerate import Accelerator
from torch import nn

from align.attributes.expressions import Expression
from align.attributes.model import AttributeModel, Head, in_label_units, load_attribute_model
from align.examples import SampledResponse
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import place_frozen_model
from align.tokenization import Tokenization


class AttributeReward:
    """One number of what an attribute model says: an expression of its attributes.

    Raises:
        UserError: for an expression that cannot be read, or an attribute that the model has no head for.
    """

    def __init__(self, scorer: "AttributeScorer", expression: str) -> None:
        self.scorer = scorer
        names = [head.name for head in scorer.heads]
        self.expression = Expression(expression, names, "attribute_reward")

    def __call__(self, responses: Sequence[SampledResponse]) -> list[float]:
        """The value of the expression for each response."""
        return [self.expression(values) for values in self.scorer(responses)]


class AttributeScorer:
    """An attribute model that reads each response once for all of its heads.

    Args:
        policy: the tokenization of who writes the responses.
        budget: padded tokens that are read at once.
    """

    def __init__(
        self, model: AttributeModel, loaded: LoadedModel, policy: Tokenization, accelerator: Accelerator, budget: int
    ) -> None:
        self.heads: list[Head] = model.heads
        self.module: nn.Module = place_frozen_model(model, accelerator)
        own = None if loaded.tokenization.reads_alike(policy) else loaded.tokenization
        shape = flops_profile(loaded.backbone, loaded.adapter)
        self.scorer = RewardModelScorer(self.module, 0.0, loaded.backbone, accelerator, budget, own, shape)

    @classmethod
    def from_folder(
        cls, folder: str, dtype: str, policy: Tokenization, accelerator: Accelerator, budget: int
    ) -> "AttributeScorer":
        """The scorer of an attribute model on disk.

        Raises:
            UserError: if it is not one.
        """
        return cls(*load_attribute_model(folder, dtype), policy, accelerator, budget)

    def __call__(self, responses: Sequence[SampledResponse]) -> list[dict[str, float]]:
        """The attributes of each response by name: probabilities, ratings from 1 to 7, and a ranking's reward."""
        outputs = cast(list[list[float]], self.scorer(responses))
        values = in_label_units(torch.tensor(outputs, dtype=torch.float64).reshape(len(responses), -1), self.heads)
        names = [head.name for head in self.heads]
        return [dict(zip(names, row, strict=True)) for row in values.tolist()]
