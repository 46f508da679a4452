"""From scores to per-token rewards; imports only torch."""

from typing import Literal

import torch
from torch import Tensor

from align.core.tensor_ops import length_mask

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


def shape_rewards(scores: Tensor, log_probs: Tensor, reference: Tensor, lengths: Tensor, beta: float) -> Tensor:
    """Per-token rewards [B, T]: -beta (log pi - log ref) on each token, and the score once, on the last real token.

    Args:
        scores: [B] of whole responses.
        log_probs: [B, T] of the policy at the sampling temperature.
        reference: [B, T] of the reference at the same temperature.
        lengths: [B] response tokens, at least 1.

    Source: lm-human-preferences, `train_policy.py`, `compute_rewards`.
    """
    mask = length_mask(lengths, log_probs.shape[1])
    rewards = (-beta * (log_probs - reference)).masked_fill(~mask, 0.0)
    return rewards.scatter_add(1, (lengths - 1)[:, None], scores.to(rewards.dtype)[:, None])
