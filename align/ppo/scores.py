"""From rewards to training scores: ensembles, length adjustment, normalization, the penalty for a missing EOS.

The penalty for a missing EOS also applies when policies are compared. Running statistics and the length adjustment do not,
because the score of a response would then depend on the other responses.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor


class RunningMoments:
    """Mean and variance of all numbers so far, equally weighted (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Biased standard deviation; 1 while all numbers are equal, so that one can divide by it."""
        return math.sqrt(self.squares / self.count) if self.squares > 0 else 1.0

    def add(self, values: Tensor) -> None:
        """Add numbers to the statistics."""
        values = values.double()
        mean, added = float(values.mean()), values.numel()
        shift, total = mean - self.mean, self.count + added
        self.squares += float(((values - mean) ** 2).sum()) + shift**2 * self.count * added / total
        self.mean += shift * added / total
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and sum of squared deviations."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class ScoreNormalization:
    """Normalizes training scores by running statistics of all scores so far, and clips them.

    Args:
        how: `none`; `scale` divides by the standard deviation; `standardize` subtracts the mean first.
        clip: the largest distance from 0; 0: no clip.
    """

    def __init__(self, how: Literal["none", "scale", "standardize"], clip: float) -> None:
        self.how, self.clip, self.moments = how, clip, RunningMoments()

    def __call__(self, scores: Tensor) -> Tensor:
        """Return normalized scores [B], which are added to the running statistics first."""
        scores = scores.float()
        self.moments.add(scores)
        if self.how == "standardize":
            scores = scores - self.moments.mean
        if self.how != "none":
            scores = scores / self.moments.std
        return scores.clamp(-self.clip, self.clip) if self.clip else scores

    def metrics(self) -> dict[str, float]:
        """The running statistics; docs/metrics.md defines them."""
        return {"reward/running_mean": self.moments.mean, "reward/running_std": self.moments.std}

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics."""
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.moments.load_state_dict(state)


def apply_missing_eos(
    scores: Tensor, ended: Tensor, missing_eos: Literal["replace", "lower", "keep"], penalty: float
) -> Tensor:
    """Return scores [B] with the penalty for responses that did not end; `penalty` is on the scale of the scores.

    A truncated response has no EOS to be scored at; summarize_from_feedback_details replaces its score by -1.

    Args:
        ended: [B] bool.
        missing_eos: `replace` the score by `penalty`, `lower` it by |penalty|, or `keep` it.
    """
    scores = scores.float()
    if missing_eos == "keep":
        return scores
    replacement = torch.full_like(scores, penalty) if missing_eos == "replace" else scores - abs(penalty)
    return torch.where(ended, scores, replacement)


def length_slope(scores: Tensor, lengths: Tensor, ended: Tensor, samples: int) -> float:
    """Return the least-squares slope of score on response length, with a per-prompt intercept.

    It is 0 if no two complete answers to a prompt differ in length.

    Args:
        scores: [B], the answers to one prompt side by side.
        lengths: [B] response tokens.
        ended: [B] True for complete responses. Truncated ones are left out: they are among the longest, and their score is
            low because they are truncated.
        samples: answers to each prompt.
    """
    longer = _from_group_mean(lengths.double(), ended, samples) * ended
    squares = float(longer.square().sum())
    return float((longer * scores).sum()) / squares if squares > 0 else 0.0


def adjust_for_length(scores: Tensor, lengths: Tensor, ended: Tensor, samples: int, slope: float) -> Tensor:
    """Scores [B] less `slope` for each token that a response is longer than its prompt's mean; arguments as `length_slope`.

    The mean is that of the complete answers, or of all answers to a prompt without one; the mean score of a prompt's
    complete answers stays. Truncated answers are adjusted too: otherwise the longest answers alone would keep the effect of
    their length.
    """
    weights = ended.view(-1, samples)
    weights = torch.where(weights.any(1, keepdim=True), weights, True).flatten()
    return scores - (slope * _from_group_mean(lengths.double(), weights, samples)).to(scores.dtype)


def _from_group_mean(values: Tensor, chosen: Tensor, samples: int) -> Tensor:
    """Distance of each value [B] from the mean of those chosen among its prompt's; of a prompt without any, from 0."""
    grouped, weights = values.view(-1, samples), chosen.view(-1, samples).to(values.dtype)
    means = (grouped * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
    return (grouped - means).flatten()


def combine_rewards(rewards: Tensor, rule: Literal["mean", "wco", "uwo"], uncertainty_weight: float) -> Tensor:
    """Combine the rewards of an ensemble into one [B] (Coste et al. 2024, arXiv 2310.02743, section 3.2).

    Args:
        rewards: [M, B] of M reward models, on one scale.
        rule: `mean`; `wco`: the lowest (worst-case optimization); `uwo`: the mean minus `uncertainty_weight` times the
            variance over members (uncertainty-weighted optimization).
    """
    if rule == "wco":
        return rewards.amin(0)
    mean = rewards.mean(0)
    return mean - uncertainty_weight * rewards.var(0, correction=0) if rule == "uwo" else mean


def disagreement(rewards: Tensor) -> Tensor:
    """Standard deviation [B] over the members of rewards [M, B] (biased)."""
    return rewards.std(0, correction=0)
