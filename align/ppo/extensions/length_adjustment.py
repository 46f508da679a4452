"""Two ways to keep response lengths: remove the length-correlated part of the training scores, or reward tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import RoleOutputs, Rollout, TrainingSignal


class LengthAdjustment(Extension):
    """Subtracts a fraction of the length-correlated part of a rollout's scores, by regression among answers to a prompt."""

    def __init__(self, share: float) -> None:
        self.share, self.slope = share, 0.0

    def load(self, context: TrainingContext) -> None:
        self.samples = context.samples_per_prompt

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        scores, lengths, ended = signal.scores.float(), rollout.lengths, rollout.ended_mask
        self.slope = length_slope(scores, lengths, ended, self.samples)
        return replace(signal, scores=adjust_for_length(scores, lengths, ended, self.samples, slope=self.share * self.slope))

    def metrics(self) -> dict[str, float]:
        return {"reward/length_slope": self.slope}


class HoldLength(Extension):
    """Rewards tokens while responses are shorter than in the first rollout, and penalizes them while they are longer.

    The reward of a token is `gain` times the relative deviation of the rollout's mean length. It is relative to the other
    answers to a prompt, so the mean score of a prompt does not change.
    """

    def __init__(self, gain: float) -> None:
        self.gain, self.first_length, self.token_reward = gain, 0.0, 0.0

    def load(self, context: TrainingContext) -> None:
        self.samples = context.samples_per_prompt

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        mean = float(rollout.lengths.double().mean())
        self.first_length = self.first_length or mean
        self.token_reward = self.gain * (1 - mean / self.first_length)
        scores, lengths, ended = signal.scores.float(), rollout.lengths, rollout.ended_mask
        return replace(signal, scores=adjust_for_length(scores, lengths, ended, self.samples, slope=-self.token_reward))

    def metrics(self) -> dict[str, float]:
        return {"reward/per_token": self.token_reward}

    def state_dict(self) -> Any:
        return {"first_length": self.first_length}

    def load_state_dict(self, state: Any) -> None:
        self.first_length = state["first_length"]


def length_slope(scores: Tensor, lengths: Tensor, ended: Tensor, samples: int) -> float:
    """Return the least-squares slope of score on response length, with a per-prompt intercept.

    It is 0 if no two complete answers to a prompt differ in length.

    Args:
        scores: [B], with answers to the same prompt adjacent.
        lengths: [B] response tokens.
        ended: [B] True for complete responses. Truncated responses are left out: they are among the longest, and have low
            scores because they are truncated.
        samples: number of answers per prompt.
    """
    longer = _from_group_mean(lengths.double(), ended, samples) * ended
    squares = float(longer.square().sum())
    return float((longer * scores).sum()) / squares if squares > 0 else 0.0


def adjust_for_length(scores: Tensor, lengths: Tensor, ended: Tensor, samples: int, slope: float) -> Tensor:
    """Subtract `slope` from scores [B] per token above the prompt's mean length. For other arguments, see `length_slope`.

    The mean is over complete answers, or over all answers if a prompt has no complete one. The mean score of a prompt's
    complete answers does not change. Truncated answers are adjusted too; otherwise only the longest answers would keep
    the effect of their length.
    """
    weights = ended.view(-1, samples)
    weights = torch.where(weights.any(1, keepdim=True), weights, True).flatten()
    return scores - (slope * _from_group_mean(lengths.double(), weights, samples)).to(scores.dtype)


def _from_group_mean(values: Tensor, chosen: Tensor, samples: int) -> Tensor:
    """Return the difference of each value [B] from the mean of its prompt's chosen values (0 without any)."""
    grouped, weights = values.view(-1, samples), chosen.view(-1, samples).to(values.dtype)
    means = (grouped * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
    return (grouped - means).flatten()
