"""From a rollout to scores: reward models, reward functions and extensions, and the penalty for a missing EOS.

Each reward is logged separately. A reward sees prompts and responses, as text and as token ids.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from align.ppo.records import SCORE_METRICS, Rollout, Scores
from align.ppo.reward_functions import WeightedFunction, call_reward_function
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import SampledResponse

ResponseScorer = Callable[[Sequence[SampledResponse]], list[float]]
"""Maps responses to rewards: a `RewardModelScorer`."""
ExtraRewards = Callable[[Rollout, Mapping[str, Tensor]], dict[str, Tensor]]
"""Maps a rollout and the rewards so far to extra rewards [B] by name: `Extensions.score`."""

RESERVED = (*SCORE_METRICS, "attributes", "length_slope", "disagreement")
"""Metrics of the score itself, `reward/mean` for one: a function of that name is logged as `reward/mean_2`."""


class Rewards:
    """All rewards of a run; each is logged under its name, and their weighted sum is the score.

    Args:
        ensemble: method of combining the rewards of several models, see `combine_rewards`.
        uncertainty_weight: see `combine_rewards`.
        accelerator: processes that score together. The first calls the functions; all receive its scores or raise its error.
        extra: function that returns additional rewards.
    """

    def __init__(
        self,
        models: Sequence[ResponseScorer],
        functions: Sequence[WeightedFunction] = (),
        ensemble: Literal["mean", "wco", "uwo"] = "mean",
        uncertainty_weight: float = 0.0,
        accelerator: Accelerator | None = None,
        extra: ExtraRewards = lambda rollout, rewards: {},
    ) -> None:
        self.models, self.functions, self.extra = list(models), list(functions), extra
        self.ensemble, self.uncertainty_weight = ensemble, uncertainty_weight
        self.accelerator = accelerator

    def __call__(self, rollout: Rollout) -> Scores:
        """Return the scores of a rollout.

        The components are the weighted rewards and, with several reward models, the reward of each and their disagreement.

        Raises:
            UserError: if a reward fails, or two rewards have the same name.
        """
        rewards, members = self._of_models(rollout)
        for reward, scores in zip(self.functions, self._of_functions(rollout), strict=True):
            numbered = (f"{reward.name}_{number}" for number in itertools.count(2))
            taken = {*RESERVED, *rewards, *members}
            name = next(name for name in itertools.chain([reward.name], numbered) if name not in taken)
            rewards[name] = reward.weight * torch.tensor(scores)
        rewards |= self.extra(rollout, rewards)
        nothing = torch.zeros(len(rollout))  # rules may be the only training signal
        return Scores(torch.stack([*rewards.values(), nothing]).sum(0), rewards | members)

    def _of_functions(self, rollout: Rollout) -> list[list[float]]:
        """Return each function's scores, equal on every process: a function may be random, or each call may cost money."""
        prompts = [prompt.conversation for prompt in rollout.prompts]
        columns = [prompt.columns for prompt in rollout.prompts]

        def call_all() -> list[list[float]]:
            return [call_reward_function(function, prompts, rollout.texts, columns) for function in self.functions]

        return run_on_main(call_all, self.accelerator) if self.functions and self.accelerator else call_all()

    def _of_models(self, rollout: Rollout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not self.models:
            return {}, {}
        rewards = torch.stack([torch.tensor(model(rollout.sampled_responses)) for model in self.models])
        members = {f"model_{number}": reward for number, reward in enumerate(rewards, 1)}
        members["disagreement"] = rewards.std(0, correction=0)
        combined = combine_rewards(rewards, self.ensemble, self.uncertainty_weight)
        return {"model": combined}, members if len(self.models) > 1 else {}


@dataclass(frozen=True)
class MissingEos:
    """Scoring of responses without EOS.

    A truncated response has no EOS at which to read a score. summarize_from_feedback_details replaces its score with -1;
    TRL subtracts a penalty.
    """

    penalty: float | None = None
    """Penalty to subtract from the score, or None."""
    score: float | None = None
    """Replacement of the score, or None."""

    def apply(self, scores: Tensor, ended: Tensor) -> Tensor:
        """Return scores [B] in which responses without EOS are penalized; `ended` is [B] bool."""
        scores = scores.float()
        if self.score is not None:
            return torch.where(ended, scores, torch.full_like(scores, self.score))
        return scores if self.penalty is None else torch.where(ended, scores, scores - self.penalty)


def combine_rewards(rewards: Tensor, ensemble: Literal["mean", "wco", "uwo"], uncertainty_weight: float) -> Tensor:
    """Combine the rewards of an ensemble into one [B] (Coste et al. 2024, arXiv 2310.02743, section 3.2).

    Args:
        rewards: [M, B] rewards of M reward models, on one scale.
        ensemble: `mean`; `wco`: the minimum (worst-case optimization); `uwo`: the mean minus `uncertainty_weight` times the
            variance over members (uncertainty-weighted optimization).
    """
    if ensemble == "wco":
        return rewards.amin(0)
    mean = rewards.mean(0)
    return mean - uncertainty_weight * rewards.var(0, correction=0) if ensemble == "uwo" else mean
