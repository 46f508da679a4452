"""Combining several reward models into one, after Coste et al. 2024 (arXiv 2310.02743), section 3.2; imports only torch."""

from typing import Literal

from torch import Tensor

EnsembleRule = Literal["mean", "wco", "uwo"]


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
