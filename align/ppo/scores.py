"""From rewards to the scores that are learned from: normalized, clipped, with rules for a missing EOS and for length.

The rules also apply when policies are compared; running statistics and the adjustment for length do not, because the
same response would get another score in other company.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from align.ppo.config import EnsembleRule, PPOConfig
from align.ppo.rollout import Rollout


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

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class Scores(NamedTuple):
    """The scores [B] of a rollout."""

    reported: Tensor
    """After the rules, on the scale of the rewards."""
    learned: Tensor
    """The scores that the policy learns from."""


class ScoreShaping:
    """Takes out what length explains, normalizes and clips scores, then applies the rules for a missing EOS and for length.

    So `missing_eos_score` and `length_penalty` are on the scale of the scores that are learned from, normalized or not.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config, self.moments = config, RunningMoments()
        self.slope = 0.0  # of the last rollout's scores; each rollout has its own

    def shape(self, raw: Tensor, rollout: Rollout, learned: Tensor | None = None) -> Scores:
        """Shape scores; those to learn from are added to the running statistics first.

        Args:
            raw: [B] on the scale of the rewards.
            learned: [B] scores to learn from, if they differ from `raw`.
        """
        learned, config = (raw if learned is None else learned).float(), self.config
        if config.length_adjustment:
            answers = (rollout.lengths, rollout.ended_mask, config.samples_per_prompt)
            self.slope = length_slope(learned, *answers)
            adjusted = adjust_for_length(learned, *answers, config.length_adjustment * self.slope)
            if config.missing_eos == "replace":  # these scores go into the running statistics alone
                adjusted = torch.where(rollout.ended_mask, adjusted, learned)
            learned = adjusted
        self.moments.add(learned)
        if config.normalize_scores == "standardize":
            learned = learned - self.moments.mean
        if config.normalize_scores != "none":
            learned = learned / self.moments.std
        if config.score_clip:
            learned = learned.clamp(-config.score_clip, config.score_clip)
        return Scores(self.apply_rules(raw, rollout), self.apply_rules(learned, rollout))

    def apply_rules(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Scores [B] after the rules for a missing EOS and for length."""
        config, ended, lengths = self.config, rollout.ended_mask, rollout.lengths
        scores = apply_missing_eos_rule(scores.float(), ended, config.missing_eos, config.missing_eos_score)
        return penalize_length(scores, lengths, config.length_limit, config.length_penalty)

    @property
    def replacement(self) -> float | None:
        """The score of every response that ran into `max_new_tokens`; None unless `missing_eos` replaces it."""
        config = self.config
        if config.missing_eos != "replace":
            return None
        score, longest = torch.tensor(config.missing_eos_score), torch.tensor(config.max_new_tokens)
        return float(penalize_length(score, longest, config.length_limit, config.length_penalty))

    def metrics(self) -> dict[str, float]:
        """The running statistics, and what length explained; docs/metrics.md defines them."""
        figures = {"reward/running_mean": self.moments.mean, "reward/running_std": self.moments.std}
        return figures | ({"reward/length_slope": self.slope} if self.config.length_adjustment else {})

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self.moments.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.moments.load_state(state)


MissingEos = Literal["replace", "lower", "keep"]


def apply_missing_eos_rule(scores: Tensor, ended: Tensor, missing_eos: MissingEos, penalty: float) -> Tensor:
    """Scores [B] after the rule for responses that did not end.

    A truncated response has no EOS to be scored at; summarize_from_feedback_details replaces its score by -1.

    Args:
        ended: [B] bool.
        missing_eos: `replace` the score by `penalty`, `lower` it by |penalty|, or `keep` it.
    """
    if missing_eos == "keep":
        return scores
    replacement = torch.full_like(scores, penalty) if missing_eos == "replace" else scores - abs(penalty)
    return torch.where(ended, scores, replacement)


def penalize_length(scores: Tensor, lengths: Tensor, limit: int, penalty: float) -> Tensor:
    """Scores [B] minus `penalty` for each token beyond `limit`.

    Args:
        lengths: [B] response tokens.
        limit: tokens without a penalty.
    """
    return scores - penalty * (lengths - limit).clamp(min=0).to(scores.dtype)


def length_slope(scores: Tensor, lengths: Tensor, ended: Tensor, samples: int) -> float:
    """Return the least-squares slope of score on response length, with a per-prompt intercept.

    It is 0 if no two complete answers to a prompt differ in length.

    Args:
        scores: [B], the answers to one prompt side by side.
        lengths: [B] response tokens.
        ended: [B] True where the response ended by itself. What was cut off is left out: its score is low because it was
            cut off, and it is among the longest.
        samples: answers to each prompt.
    """
    longer = _from_group_mean(lengths.double(), ended, samples) * ended
    squares = float(longer.square().sum())
    return float((longer * scores).sum()) / squares if squares > 0 else 0.0


def adjust_for_length(scores: Tensor, lengths: Tensor, ended: Tensor, samples: int, slope: float) -> Tensor:
    """Scores [B] less `slope` for each token that a response is longer than its prompt's mean; arguments as `length_slope`.

    The mean is that of the answers that ended, or of all answers to a prompt where none ended. Answers that were cut off
    are adjusted too: otherwise the longest answers alone would keep what their length adds to the score. The mean score of
    a prompt's answers that ended stays.
    """
    weights = ended.view(-1, samples)
    weights = torch.where(weights.any(1, keepdim=True), weights, True).flatten()
    return scores - (slope * _from_group_mean(lengths.double(), weights, samples)).to(scores.dtype)


def _from_group_mean(values: Tensor, chosen: Tensor, samples: int) -> Tensor:
    """Distance of each value [B] from the mean of those chosen among its prompt's; of a prompt without any, from 0."""
    grouped, weights = values.view(-1, samples), chosen.view(-1, samples).to(values.dtype)
    means = (grouped * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
    return (grouped - means).flatten()


def combine_rewards(rewards: Tensor, rule: EnsembleRule, uncertainty_weight: float) -> Tensor:
    """The rewards [B] of an ensemble.

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
