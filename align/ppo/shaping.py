"""From scores to per-token rewards; imports only torch."""

from typing import Literal

import torch
from torch import Tensor

from align.tensor_ops import length_mask

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
