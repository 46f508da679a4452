"""From rewards to training scores: ensembles, length adjustment, normalization, the penalty for a missing EOS.

The penalty for a missing EOS also applies when policies are compared. Running statistics and the length adjustment do not,
because the score of a response would then depend on the other responses.
"""

from typing import Literal

import torch
from torch import Tensor


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
