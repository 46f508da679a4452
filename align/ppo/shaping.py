"""From scores to per-token rewards; imports torch alone."""

from typing import Literal

import torch
from torch import Tensor

from align.tensor_ops import length_mask

MissingEnd = Literal["replace", "lower", "keep"]


def settle_scores(scores: Tensor, ended: Tensor, missing_end: MissingEnd, penalty: float) -> Tensor:
    """Scores [B] after the rule for responses that did not end.

    A response that was cut at the limit has no proper end to be judged at; summarize_from_feedback_details replaces its
    score by -1.

    Args:
        ended: [B] bool.
        missing_end: `replace` the score by `penalty`, `lower` it by |penalty|, or `keep` it.
    """
    if missing_end == "keep":
        return scores
    instead = torch.full_like(scores, penalty) if missing_end == "replace" else scores - abs(penalty)
    return torch.where(ended, scores, instead)


def shape_rewards(scores: Tensor, log_probs: Tensor, reference: Tensor, lengths: Tensor, beta: float) -> Tensor:
    """Per-token rewards [B, T]: -beta (log pi - log ref) on each token, and the score once, on the last real token.

    Args:
        scores: [B] of whole responses.
        log_probs, reference: [B, T] of policy and reference at the sampling temperature.
        lengths: [B] response tokens, at least 1.

    Source: lm-human-preferences, `train_policy.py`, `compute_rewards`.
    """
    mask = length_mask(lengths, log_probs.shape[1])
    rewards = (-beta * (log_probs - reference)).masked_fill(~mask, 0.0)
    return rewards.scatter_add(1, (lengths - 1)[:, None], scores.to(rewards.dtype)[:, None])
