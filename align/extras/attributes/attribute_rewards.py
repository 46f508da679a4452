"""An expression over the attributes of a response as a reward of PPO."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from align.core.settings import Settings, option
from align.extras.attributes.expressions import Expression
from align.extras.attributes.model import heads_of
from align.extras.attributes.scoring import AttributeScorer
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Rollout
from align.ppo.scoring_models import require_readable
from align.runtime.flops import forward_flops


@dataclass(kw_only=True)
class AttributeRewardSettings(Settings):
    """An attribute model, and the reward that is computed from its attributes."""

    model: str = option("", "folder of an attribute model (`align attributes`)", required=True)
    reward: str = option("", "reward from its attributes, such as 3*sensible+specific+interesting-5*unsafe", required=True)


class AttributeRewards(Extension):
    """Adds the value of an expression over attributes to the score.

    Raises:
        UserError: for an expression that the model cannot answer.
    """

    gives_scores = True

    def __init__(self, settings: AttributeRewardSettings) -> None:
        self.folder, names = settings.model, [head.name for head in heads_of(settings.model)]
        self.expression = Expression(settings.reward, names, "attributes.reward")

    def load(self, context: TrainingContext) -> None:
        run, policy = context.run, context.policy
        place = (policy.tokenization, run.accelerator, run.config.micro_batch_tokens)
        self.scorer = AttributeScorer.from_folder(self.folder, context.model_config.dtype, *place)
        self.modules = [self.scorer.module]
        model, after = self.scorer.scorer, self.scorer.question_tokens
        require_readable(self.folder, model, context.prompts, context.max_new_tokens, policy, after)

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        return {"attributes": torch.tensor([self.expression(values) for values in self.scorer(rollout.sampled)])}

    def flops(self, work: Sequence[tuple[int, Sequence[int]]]) -> float:
        profile = self.scorer.scorer.flops_profile
        return sum(forward_flops(profile, prompt, responses) for prompt, responses in work) if profile else 0.0
