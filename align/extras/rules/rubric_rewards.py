"""Rubrics as rewards of PPO."""

import torch
from torch import Tensor

from align.extras.rules.rubrics import LocalJudge, RubricSettings, load_rubrics
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Rollout


class RubricRewards(Extension):
    """Adds the weighted reward of each rubric to the score."""

    gives_scores = True

    def __init__(self, settings: RubricSettings) -> None:
        self.settings = settings

    def load(self, context: TrainingContext) -> None:
        run, dtype = context.run, context.model_config.dtype
        self.scorers = load_rubrics(self.settings, run.accelerator, dtype, run.config.micro_batch_tokens)
        judge = self.scorers[0].judge  # one serves all rubrics
        self.modules = [judge.module] if isinstance(judge, LocalJudge) else []
        for scorer in self.scorers:
            rubric = scorer.rubric
            if not any(rubric.applies(prompt.category) for prompt in context.training_prompts):
                wanted = " or ".join(sorted(rubric.categories))
                run.print(f"warning: rubric '{rubric.name}' will always give 0: no prompt has category {wanted}")

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        conversations = [prompt.conversation for prompt in rollout.prompts]
        categories = [prompt.category for prompt in rollout.prompts]
        rewards = {}
        for scorer in self.scorers:
            values = torch.tensor(scorer(conversations, rollout.texts, categories))
            rewards[f"rubric/{scorer.rubric.name}"] = scorer.rubric.weight * values
        return rewards
